"""EvictionLog: what was evicted lately, so that a miss can be explained. Keys only, no text; bounded."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class Eviction(NamedTuple):
    """One block that was evicted."""

    key: bytes
    idle_since: float  # seconds, on the cache's clock
    at: float  # seconds, on the cache's clock
    blocks_wanted: int  # what evict was asked for


class _Round(NamedTuple):
    """What one call of evict dropped."""

    first: int  # number of its first block among all evicted ever
    keys: list[bytes]
    since: list[float]
    at: float
    blocks_wanted: int


class EvictionLog:
    """The last evictions: whole rounds, as many as are needed to reach back ``reach`` blocks.

    total: blocks evicted since the log began
    """

    def __init__(self, reach: int = 4096) -> None:
        self.total = 0
        self._reach = reach
        self._rounds: deque[_Round] = deque()

    def add(self, keys: list[bytes], since: list[float], at: float, blocks_wanted: int) -> None:
        """One round of evictions, in order."""
        first = self.total
        self.total += len(keys)
        cut = max(0, len(keys) - self._reach)
        self._rounds.append(_Round(first + cut, keys[cut:], since[cut:], at, blocks_wanted))
        while len(self._rounds) > 1 and self._rounds[1].first <= self.total - self._reach:
            self._rounds.popleft()

    def find(self, key: bytes, before: int) -> Eviction | None:
        """The last eviction of ``key`` among the first ``before`` ever; None if there is none in reach."""
        for entry in reversed(self._rounds):
            keys = entry.keys[: max(0, before - entry.first)]
            for index in range(len(keys) - 1, -1, -1):
                if keys[index] == key:
                    return Eviction(key, entry.since[index], entry.at, entry.blocks_wanted)
        return None
