"""Eviction policies: which idle block leaves the prefix cache first.

A policy is the allocator's listener: it hears when a cached block becomes idle (only the cache holds it) and when it
is busy again, and names the next one to leave. Whatever the policy, a block may leave only after the cached blocks
that continue it; a policy other than LRU counts children from what ``publish`` and its own ``pop`` tell it.

A policy says what happens to one block. The calls that end in ``_many`` are the same for a run of blocks; override
them where a loop in one place is faster than a call per block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque

from pagedkv.cache.native import native


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

    def idle_many(self, blocks: list[int]) -> None:
        """``idle`` of each, in order."""
        for block in blocks:
            self.idle(block)

    def busy_many(self, blocks: list[int]) -> None:
        """``busy`` of each, in order."""
        for block in blocks:
            self.busy(block)

    def publish_many(self, blocks: list[int], parent: int) -> None:
        """``publish`` of a run in which each block continues the one before it, the first one ``parent``."""
        for block in blocks:
            self.publish(block, parent)
            parent = block

    def pop_many(self, n: int) -> tuple[list[int], list[float]]:
        """``pop``, n times: the blocks, and when each became idle."""
        popped = [self.pop() for _ in range(n)]
        return [block for block, _ in popped], [since for _, since in popped]


class _Run:
    """Blocks that became idle in one call, in that order; those before ``start`` have left."""

    __slots__ = ("blocks", "since", "start")

    def __init__(self, blocks: list[int], since: float) -> None:
        self.blocks = blocks
        self.since = since
        self.start = 0


@native
def stand_in(run_of: dict[int, _Run], run: _Run, blocks: list[int]) -> None:
    """``run`` becomes the run of each block."""
    for block in blocks:
        run_of[block] = run


@native
def step_out(run_of: dict[int, _Run], blocks: list[int]) -> None:
    """No block of these is in a run any more."""
    for block in blocks:
        del run_of[block]


@native
def still_in(run_of: dict[int, _Run], run: _Run, places: list[int]) -> list[int]:
    """Those of ``places`` whose block did not leave ``run`` since it was put there."""
    return [block for block in places if run_of.get(block) is run]


class LRU(EvictionPolicy):
    """Least recently used first; O(1) for every block, amortised.

    A queue of runs: the blocks that one release left idle, in its order. Each idle block knows its run. One that
    became busy again is only forgotten there; its place in the queue is passed over when its turn comes, and swept
    out when more places are stale than not. Sequences release their blocks tail first, and whoever holds a block
    holds all its cached ancestors, so a parent always stands behind its children: the order is leaf first by
    construction.
    """

    def __init__(self) -> None:
        self._runs: deque[_Run] = deque()
        self._run_of: dict[int, _Run] = {}
        self._num_places = 0  # in all runs, stale ones included

    def idle(self, block: int) -> None:
        self.idle_many([block])

    def idle_many(self, blocks: list[int]) -> None:
        run = _Run(blocks, self.now)
        self._runs.append(run)
        stand_in(self._run_of, run, blocks)
        self._num_places += len(blocks)
        if self._num_places > 2 * len(self._run_of) + 1024:
            self._sweep()

    def busy(self, block: int) -> None:
        del self._run_of[block]

    def busy_many(self, blocks: list[int]) -> None:
        step_out(self._run_of, blocks)

    def publish(self, block: int, parent: int) -> None:
        """Nothing to note: the order needs no history."""

    def publish_many(self, blocks: list[int], parent: int) -> None:
        """Nothing to note."""

    def pop(self) -> tuple[int, float]:
        (block,), (since,) = self.pop_many(1)
        return block, since

    def pop_many(self, n: int) -> tuple[list[int], list[float]]:
        if n > len(self._run_of):
            raise KeyError(f"{n} blocks are asked for; {len(self._run_of)} are idle")
        blocks: list[int] = []
        since: list[float] = []
        runs, run_of = self._runs, self._run_of
        while len(blocks) < n:
            run = runs[0]
            places = run.blocks[run.start : run.start + n - len(blocks)]
            leaving = still_in(run_of, run, places)
            step_out(run_of, leaving)
            blocks += leaving
            since += [run.since] * len(leaving)
            run.start += len(places)
            self._num_places -= len(places)
            if run.start == len(run.blocks):
                runs.popleft()
        return blocks, since

    def clear(self) -> None:
        self._runs.clear()
        self._run_of.clear()
        self._num_places = 0

    def idle_blocks(self) -> list[tuple[int, float]]:
        return [
            (block, run.since) for run in self._runs for block in still_in(self._run_of, run, run.blocks[run.start :])
        ]

    def _sweep(self) -> None:
        kept: deque[_Run] = deque()
        for run in self._runs:
            run.blocks = still_in(self._run_of, run, run.blocks[run.start :])
            run.start = 0
            if run.blocks:
                kept.append(run)
        self._runs = kept
        self._num_places = len(self._run_of)

    def __len__(self) -> int:
        return len(self._run_of)

    def __contains__(self, block: object) -> bool:
        return block in self._run_of
