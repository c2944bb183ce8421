"""Eviction policies: which idle block leaves the prefix cache first.

A policy is the allocator's listener: it hears when a cached block becomes idle (only the cache holds it) and when it
is busy again, and names the next one to leave. Whatever the policy, a block may leave only after the cached blocks
that continue it; a policy other than LRU counts children from what ``publish`` and its own ``pop`` tell it.

A policy says what happens to one block. The calls that end in ``_many`` are the same for a run of blocks; override
them where a loop in one place is faster than a call per block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence


class EvictionPolicy(ABC):
    """What PrefixCache and the allocator ask of a policy.

    now: seconds; PrefixCache moves it once per call of its own, not per block
    """

    now: float = 0.0

    @abstractmethod
    def idle(self, block: int) -> None:
        """Only the cache holds ``block`` now."""

    @abstractmethod
    def busy(self, block: int) -> None:
        """Somebody else holds ``block`` again."""

    @abstractmethod
    def publish(self, block: int, parent: int) -> None:
        """``block`` was cached after ``parent`` (negative: the root of a scope). It is busy."""

    @abstractmethod
    def pop(self) -> tuple[int, float]:
        """The idle block that leaves the cache now, and when it became idle. KeyError if there is none."""

    @abstractmethod
    def clear(self) -> None:
        """Every block has left the cache."""

    @abstractmethod
    def idle_blocks(self) -> list[tuple[int, float]]:
        """Every idle block, and when it became idle; O(idle blocks), for looking at (the cache map)."""

    @abstractmethod
    def __len__(self) -> int:
        """Idle blocks: each of them can be evicted."""

    @abstractmethod
    def __contains__(self, block: object) -> bool:
        """Whether ``block`` is idle."""

    def idle_many(self, blocks: Sequence[int]) -> None:
        """``idle`` of each, in order."""
        for block in blocks:
            self.idle(block)

    def busy_many(self, blocks: Sequence[int]) -> None:
        """``busy`` of each, in order."""
        for block in blocks:
            self.busy(block)

    def publish_many(self, blocks: Sequence[int], parent: int) -> None:
        """``publish`` of a run in which each block continues the one before it, the first one ``parent``."""
        for block in blocks:
            self.publish(block, parent)
            parent = block

    def pop_many(self, n: int) -> list[tuple[int, float]]:
        """``pop``, n times."""
        return [self.pop() for _ in range(n)]


class LRU(EvictionPolicy):
    """Least recently used first; O(1) for every call and block.

    An ordered map (in CPython a linked list threaded through a hash table) of idle blocks, the one that has been
    idle longest first. Sequences release their blocks tail first, and whoever holds a block holds all its cached
    ancestors, so a parent always stands behind its children: the order is leaf first by construction.
    """

    def __init__(self) -> None:
        self._since: OrderedDict[int, float] = OrderedDict()

    def idle(self, block: int) -> None:
        self._since[block] = self.now

    def idle_many(self, blocks: Sequence[int]) -> None:
        since, now = self._since, self.now
        for block in blocks:  # an OrderedDict's own update is several times slower
            since[block] = now

    def busy(self, block: int) -> None:
        del self._since[block]

    def busy_many(self, blocks: Sequence[int]) -> None:
        since = self._since
        for block in blocks:
            del since[block]

    def publish(self, block: int, parent: int) -> None:
        """Nothing to note: the order needs no history."""

    def publish_many(self, blocks: Sequence[int], parent: int) -> None:
        """Nothing to note."""

    def pop(self) -> tuple[int, float]:
        return self._since.popitem(last=False)

    def pop_many(self, n: int) -> list[tuple[int, float]]:
        popitem = self._since.popitem
        return [popitem(False) for _ in range(n)]

    def clear(self) -> None:
        self._since.clear()

    def idle_blocks(self) -> list[tuple[int, float]]:
        return list(self._since.items())

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, block: object) -> bool:
        return block in self._since
