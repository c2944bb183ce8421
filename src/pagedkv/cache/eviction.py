"""Eviction policies: which idle block leaves the prefix cache first.

A policy is the allocator's listener: it hears when a cached block becomes idle (only the cache holds it) and when it
is busy again, and names the next one to leave. Whatever the policy, a block may leave only after the cached blocks
that continue it; a policy other than LRU counts children from what ``publish`` and its own ``pop`` tell it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from pagedkv.cache.allocator import BlockListener


class EvictionPolicy(BlockListener, Protocol):
    """What PrefixCache asks of a policy. ``now`` is in seconds; PrefixCache moves it once per call, not per block."""

    now: float

    def publish(self, block: int, parent: int) -> None:
        """``block`` was cached after ``parent`` (negative: the root of a scope). It is busy."""

    def pop(self) -> tuple[int, float]:
        """The idle block that leaves the cache now, and when it became idle. KeyError if there is none."""

    def clear(self) -> None:
        """Every block has left the cache."""

    def idle_blocks(self) -> list[tuple[int, float]]:
        """Every idle block, and when it became idle; O(idle blocks), for looking at."""

    def __contains__(self, block: object) -> bool:
        """Whether ``block`` is idle."""


class LRU:
    """Least recently used first; O(1) for every call.

    An ordered map (in CPython a linked list threaded through a hash table) of idle blocks, the one that has been
    idle longest first. Sequences release their blocks tail first, and whoever holds a block holds all its cached
    ancestors, so a parent always stands behind its children: the order is leaf first by construction.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._since: OrderedDict[int, float] = OrderedDict()

    def idle(self, block: int) -> None:
        self._since[block] = self.now

    def busy(self, block: int) -> None:
        del self._since[block]

    def publish(self, block: int, parent: int) -> None:
        """Nothing to note: the order needs no history."""

    def clear(self) -> None:
        self._since.clear()

    def pop(self) -> tuple[int, float]:
        return self._since.popitem(last=False)

    def idle_blocks(self) -> list[tuple[int, float]]:
        return list(self._since.items())

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, block: object) -> bool:
        return block in self._since
