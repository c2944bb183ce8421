"""ChildIndex: the cached blocks that continue a given prefix, ordered by their tokens.

A node is a cached block, or a negative number for the root of a scope. Of all children of a node, the one that
shares most leading tokens with a text is a neighbour of the place where the text would be inserted: one bisection,
whether the node has one child (nearly all have) or ten thousand (the first turns after one system prompt).

Cost: O(log n) comparisons of one block of tokens per call, n the children of that node. A node with one child costs
one list entry; more are kept in sorted runs of at most ``RUN`` blocks, so that an insertion moves a bounded number.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence

RUN = 512


class _Run:
    """Children of one node in order, cut into lists of at most RUN."""

    __slots__ = ("_order", "lists")

    def __init__(self, order: ChildIndex, blocks: list[int]) -> None:
        self._order = order
        self.lists = [blocks]

    def place(self, sort_key: tuple[bytes, int]) -> tuple[int, int]:
        """(list, index) of the first block that is not before ``sort_key``; may be one past the end."""
        key = self._order.sort_key
        row = 0
        if len(self.lists) > 1:
            row = max(0, bisect_right(self.lists, sort_key, key=lambda blocks: key(blocks[0])) - 1)
        return row, bisect_left(self.lists[row], sort_key, key=key)

    def add(self, block: int) -> None:
        key = self._order.sort_key
        row, _ = self.place(key(block))
        blocks = self.lists[row]
        insort(blocks, block, key=key)
        if len(blocks) > RUN:
            half = len(blocks) // 2
            self.lists.insert(row + 1, blocks[half:])
            del blocks[half:]

    def remove(self, block: int) -> None:
        row, index = self.place(self._order.sort_key(block))
        del self.lists[row][index]
        if not self.lists[row]:
            del self.lists[row]

    def around(self, chunk: bytes) -> list[int]:
        """The neighbours of the place where ``chunk`` would stand: at most one before and one after."""
        row, index = self.place((chunk, -1))
        blocks = self.lists[row]
        near = []
        if index:
            near.append(blocks[index - 1])
        if index < len(blocks):
            near.append(blocks[index])
        elif row + 1 < len(self.lists):
            near.append(self.lists[row + 1][0])
        return near

    def __iter__(self) -> Iterator[int]:
        for blocks in self.lists:
            yield from blocks


class ChildIndex:
    """Children of every node.

    tokens:   list indexed by block with the encoded tokens of each cached block (shared with the prefix cache)
    of_block: list indexed by block: None, the only child, or all of them in order
    """

    def __init__(self, num_blocks: int, tokens: Sequence[bytes]) -> None:
        self._tokens = tokens
        self.of_block: list[int | _Run | None] = [None] * num_blocks
        self._of_root: dict[int, int | _Run] = {}

    def sort_key(self, block: int) -> tuple[bytes, int]:
        """Order by tokens, then by id, so that equal tokens under different media have a place each."""
        return self._tokens[block], block

    def add(self, node: int, block: int) -> None:
        """``block``, whose tokens are in place, continues ``node``."""
        present = self._get(node)
        if present is None:
            self._set(node, block)
        elif isinstance(present, int):
            self._set(node, _Run(self, sorted((present, block), key=self.sort_key)))
        else:
            present.add(block)

    def remove(self, node: int, block: int) -> bool:
        """``block``, whose tokens are still in place, leaves. Returns whether it was the last child of ``node``."""
        present = self.of_block[node] if node >= 0 else self._of_root.get(node)
        if isinstance(present, _Run):
            present.remove(block)
            if present.lists:
                return False
        elif present != block:
            raise KeyError(f"block {block} is no child of node {node}")
        self._set(node, None)
        return True

    def around(self, node: int, chunk: bytes) -> list[int]:
        """At most two children of ``node``; one of them shares most leading tokens with ``chunk``."""
        present = self._get(node)
        if present is None:
            return []
        return [present] if isinstance(present, int) else present.around(chunk)

    def has_any(self, node: int) -> bool:
        """Whether anything continues ``node``."""
        return self._get(node) is not None

    def clear(self) -> None:
        """Forgets everything."""
        self.of_block = [None] * len(self.of_block)
        self._of_root.clear()

    def children(self, node: int) -> list[int]:
        """All of them, in order; for checks and policies, never on the way of a request."""
        present = self._get(node)
        if present is None:
            return []
        return [present] if isinstance(present, int) else list(present)

    def _get(self, node: int) -> int | _Run | None:
        return self.of_block[node] if node >= 0 else self._of_root.get(node)

    def _set(self, node: int, value: int | _Run | None) -> None:
        if node >= 0:
            self.of_block[node] = value
        elif value is None:
            del self._of_root[node]
        else:
            self._of_root[node] = value
