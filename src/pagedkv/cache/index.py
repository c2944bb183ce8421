"""BlockIndex: the content of every cached block, and the block of every key.

Owns:   key -> block; for each cached block its key, its tokens, its parent and its children.
Rules:  a cached block is full and its parent is cached, so the blocks of a scope form a tree under a root (I6).
        A hit compares tokens, media and parent as well as the key: whatever the hash function does, a block is found
        only by the text whose KV it holds.
Cost:   O(1) per block. Per cached block one key (32 bytes), its encoded tokens (4 bytes each) and a few list slots:
        no object of its own, no tuple of its prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import Any

from pagedkv.cache.children import ChildIndex
from pagedkv.cache.keys import KeyChain, KeyScope, MediaSpan, block_key
from pagedkv.cache.native import native
from pagedkv.errors import BlockStateError


def num_common_tokens(a: bytes, b: bytes) -> int:
    """Leading tokens that two encoded texts share."""
    size = min(len(a), len(b))
    different = int.from_bytes(a[:size], "little") ^ int.from_bytes(b[:size], "little")
    return size // 4 if different == 0 else ((different & -different).bit_length() - 1) // 32


@native
def follow(
    by_key: dict[bytes, int],
    parents: list[int],
    tokens: list[bytes],
    keys: list[bytes],
    chunks: list[bytes],
    node: int,
    most: int,
) -> list[int]:
    """The blocks under the first ``most`` of ``keys``, each after the one before and with the tokens of its chunk."""
    found: list[int] = []
    for key, chunk in zip(keys[:most], chunks, strict=False):
        block = by_key.get(key)
        if block is None or parents[block] != node or tokens[block] != chunk:
            break
        found.append(block)
        node = block
    return found


@native
def link_blocks(
    keys: list[bytes | None],
    tokens: list[bytes],
    parents: list[int],
    child_of: list[Any],
    blocks: list[int],
    run_keys: list[bytes],
    chunks: list[bytes],
    parent: int,
) -> None:
    """Notes a run of blocks: the first stands after ``parent``, each of the others alone after the one before."""
    for block, key, chunk in zip(blocks, run_keys, chunks, strict=False):
        keys[block] = key
        tokens[block] = chunk
        parents[block] = parent
        parent = block
    for block, child in pairwise(blocks):
        child_of[block] = child


@native
def unlink_blocks(
    by_key: dict[bytes, int],
    keys: list[bytes | None],
    tokens: list[bytes],
    parents: list[int],
    child_of: list[Any],
    hits: dict[int, int],
    blocks: list[int],
    start: int,
    gone: list[bytes],
) -> int:
    """Takes out ``blocks[start:]`` and adds their keys to ``gone``, up to the first that is not a plain case.

    Plain: cached, not continued, the only child of a block; that block gets its hits. Returns where it stopped.
    """
    for index in range(start, len(blocks)):
        block = blocks[index]
        key, node = keys[block], parents[block]
        if key is None or node < 0 or child_of[block] is not None or child_of[node] != block:
            return index
        gone.append(key)
        del by_key[key]
        keys[block] = None
        tokens[block] = b""
        child_of[node] = None
        if block in hits:
            hits[node] = hits.get(node, 0) + hits.pop(block)
    return len(blocks)


class BlockIndex:
    """What is cached, by key and by block.

    blocks:   dict, key -> block
    hits:     dict, block -> how many prompts were found up to it and no further; with those of its descendants, how
              often it was reused. What an evicted block had goes to its parent
    keys, tokens, parents: lists indexed by block; None, b"" and anything where nothing is cached. A parent is a block,
              or the negative number of a root
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: dict[bytes, int] = {}
        self.keys: list[bytes | None] = [None] * num_blocks
        self.tokens: list[bytes] = [b""] * num_blocks
        self.parents: list[int] = [0] * num_blocks
        self.children = ChildIndex(num_blocks, self.tokens)
        self.hits: dict[int, int] = {}
        self._media: dict[int, tuple[MediaSpan, ...]] = {}
        self._roots: dict[KeyScope, int] = {}
        self._scopes: dict[int, KeyScope] = {}
        self._next_root = -1

    def __len__(self) -> int:
        return len(self.blocks)

    def find(self, chain: KeyChain, most: int) -> list[int]:
        """The cached blocks of the first full blocks of a chain, at most ``most`` of them."""
        node = self._roots.get(chain.scope)
        if node is None:
            return []
        hits = follow(self.blocks, self.parents, self.tokens, chain.keys, chain.chunks, node, most)
        if chain.media or self._media:
            for index, block in enumerate(hits):
                if self._media.get(block) != chain.media.get(index):
                    return hits[:index]
        return hits

    def holds(self, block: int, node: int | None, chain: KeyChain, index: int) -> bool:
        """Whether ``block`` is what block ``index`` of the chain looks like after ``node``."""
        same = self.parents[block] == node and self.tokens[block] == chain.chunks[index]
        return same and self._media.get(block) == chain.media.get(index)

    def nearest(self, node: int | None, chain: KeyChain, index: int, most: int) -> tuple[int | None, int]:
        """The child of ``node`` that shares most leading tokens with block ``index`` of the chain, and how many.

        At most ``most`` tokens are counted; a difference in media ends the common part before its placeholder.
        """
        if node is None or most <= 0:
            return None, 0
        is_full = index < len(chain.keys)
        probe = chain.chunks[index] if is_full else chain.tail
        candidates = self.children.around(node, probe)
        exact = self.blocks.get(chain.keys[index]) if is_full else None
        if exact is not None and self.holds(exact, node, chain, index):
            candidates = [exact]
        best, shared = None, -1
        for block in candidates:
            common = min(num_common_tokens(self.tokens[block], probe), self._same_media(block, chain, index), most)
            if common > shared:
                best, shared = block, common
        return best, max(shared, 0)

    def root(self, scope: KeyScope) -> int | None:
        """The node of a scope's root; None if nothing is cached under it."""
        return self._roots.get(scope)

    def scope_of(self, root: int) -> KeyScope:
        """The scope whose root is this node."""
        return self._scopes[root]

    def roots(self) -> list[int]:
        """Roots under which something is cached, the newest scope first."""
        return list(reversed(self._scopes))

    def add(self, blocks: list[int], node: int | None, chain: KeyChain, start: int) -> tuple[int, int]:
        """``blocks`` hold blocks ``start``, ``start + 1``, ... of the chain, the first after ``node`` (None: the root).

        The first one's key must be free, so nothing cached continues it; where two digests collide further on, the
        run is cut short before the second. Returns (the first one's parent, blocks added).
        """
        parent = self._open_root(chain.scope) if node is None else node
        run_keys, chunks = chain.keys[start : start + len(blocks)], chain.chunks[start : start + len(blocks)]
        blocks = blocks[: self._take(run_keys, blocks)]
        link_blocks(self.keys, self.tokens, self.parents, self.children.of_block, blocks, run_keys, chunks, parent)
        self.children.add(parent, blocks[0])
        for index in chain.media:
            if start <= index < start + len(blocks):
                self._media[blocks[index - start]] = chain.media[index]
        return parent, len(blocks)

    def remove(self, blocks: list[int]) -> list[bytes]:
        """``blocks`` leave, in this order; none is continued by a cached block when its turn comes. Returns their keys.

        Raises BlockStateError at the first that is not cached or still continued; those before it have left.
        """
        gone: list[bytes] = []
        while len(gone) < len(blocks):
            places = self.blocks, self.keys, self.tokens, self.parents, self.children.of_block, self.hits
            stopped = unlink_blocks(*places, blocks, len(gone), gone)
            if stopped < len(blocks):
                gone.append(self._remove_one(blocks[stopped]))
        for block in self._media.keys() & set(blocks) if self._media else ():
            del self._media[block]
        return gone

    def clear(self) -> list[int]:
        """Forgets everything. Returns the blocks that were cached."""
        gone = list(self.blocks.values())
        for block in gone:
            self.keys[block], self.tokens[block] = None, b""
        for mapping in (self.blocks, self.hits, self._media, self._roots, self._scopes):
            mapping.clear()
        self.children.clear()
        return gone

    def check(self) -> None:
        """Verifies that keys, tokens, parents and children agree; O(pool), for tests."""
        if len(self.keys) - self.keys.count(None) != len(self.blocks):
            raise BlockStateError(f"{len(self.blocks)} keys for {len(self.keys) - self.keys.count(None)} cached blocks")
        for key, block in self.blocks.items():
            node = self.parents[block]
            parent_key = self.keys[node] if node >= 0 else self._scopes[node].root(self.block_size)
            if parent_key is None:
                raise BlockStateError(f"block {block} is cached and its parent {node} is not")
            tokens, media = self.tokens[block], self._media.get(block, ())
            if len(tokens) != 4 * self.block_size:
                raise BlockStateError(f"block {block} is cached with {len(tokens) // 4} tokens; it is not full")
            if self.keys[block] != key or block_key(parent_key, tokens, media) != key:
                raise BlockStateError(f"the key of block {block} is not that of its parent, tokens and media")
        nodes = [*self.blocks.values(), *self._scopes]
        continued = {child: node for node in nodes for child in self.children.children(node)}
        if continued != {block: self.parents[block] for block in self.blocks.values()}:
            raise BlockStateError("children and parents disagree")

    def _remove_one(self, block: int) -> bytes:
        """``block`` leaves, whatever stands around it. Returns its key."""
        key, node = self.keys[block], self.parents[block]
        if key is None or self.children.has_any(block):
            state = "not cached" if key is None else "continued by other cached blocks"
            raise BlockStateError(f"cannot remove block {block} from the index: it is {state}")
        if self.children.remove(node, block) and node < 0:
            del self._roots[self._scopes.pop(node)]
        del self.blocks[key]
        self.keys[block], self.tokens[block] = None, b""
        hits = self.hits.pop(block, 0)
        if hits and node >= 0:
            self.hits[node] = self.hits.get(node, 0) + hits
        return key

    def _take(self, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Gives each block its key, up to the first key that is taken already; returns how many got theirs."""
        own, before = self.blocks, len(self.blocks)
        own.update(zip(keys, blocks, strict=True))
        if len(own) == before + len(keys):
            return len(keys)
        # Two digests collide, which no run of keys does by chance: what the update wrote over is found the slow way.
        for key in keys:
            own.pop(key, None)
        taken = set(keys)
        own.update((key, block) for block, key in enumerate(self.keys) if key in taken)
        for num_taken, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            if own.setdefault(key, block) != block:
                return num_taken
        return len(keys)

    def _open_root(self, scope: KeyScope) -> int:
        node, self._next_root = self._next_root, self._next_root - 1
        self._roots[scope] = node
        self._scopes[node] = scope
        return node

    def _same_media(self, block: int, chain: KeyChain, index: int) -> int:
        """Tokens of ``block`` before the first placeholder whose media differ from the chain's."""
        for ours, theirs in zip_longest(self._media.get(block, ()), chain.media.get(index, ())):
            if ours != theirs:
                return min(span.offset % self.block_size for span in (ours, theirs) if span is not None)
        return self.block_size
