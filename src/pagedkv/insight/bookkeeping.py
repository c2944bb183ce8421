"""How fast the accounts are: operations a second of manager and prefix cache, without a model.

Each operation runs over fresh prompts until ``seconds`` have passed; the figure is the best of a few rounds, since
whatever else the machine does only adds. What is timed is checked: a hit must hit, an eviction must free.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from pagedkv.cache.manager import KVCacheManager
from pagedkv.cache.prefix import PrefixCache

ROUNDS = 5
Step = Callable[[], None]


@dataclass(frozen=True)
class OperationRate:
    """operation: what was done;  blocks: block references of one call;  us_per_call, us_per_block: microseconds"""

    operation: str
    blocks: int
    us_per_call: float
    us_per_block: float

    @property
    def calls_per_second(self) -> float:
        return 1e6 / self.us_per_call


class _Bench:
    """A pool and as many prompts as it holds."""

    def __init__(self, prompt_blocks: int, block_size: int, num_prompts: int = 64) -> None:
        draw = random.Random(0)
        self.blocks, self.size, self.count = prompt_blocks, block_size, num_prompts
        self.tokens = prompt_blocks * block_size
        self.prompts = [array("I", (draw.randrange(1 << 17) for _ in range(self.tokens))) for _ in range(num_prompts)]
        self.reset()

    def reset(self) -> None:
        self.manager = KVCacheManager(self.count * self.blocks, self.size)
        self.prefix = PrefixCache(self.manager)
        self.chains = [self.prefix.chain() for _ in self.prompts]
        for chain, prompt in zip(self.chains, self.prompts, strict=True):
            chain.extend(prompt)

    def attach(self) -> None:
        for seq, (prompt, chain) in enumerate(zip(self.prompts, self.chains, strict=True)):
            self.prefix.attach(seq, prompt, chain=chain)

    def reserve(self) -> None:
        for seq in range(self.count):
            self.manager.reserve(seq, self.tokens - self.manager.lengths[seq])

    def advance(self) -> None:
        for seq in range(self.count):
            self.manager.advance(seq, self.tokens - self.manager.lengths[seq])

    def remember(self) -> None:
        for seq, chain in enumerate(self.chains):
            self.prefix.remember(seq, chain)

    def free(self) -> None:
        for seq in range(self.count):
            self.manager.free(seq)

    def evict(self) -> None:
        self.prefix.evict(self.count * self.blocks)

    def fork(self) -> None:
        for seq in range(self.count):
            self.manager.fork(seq, -1 - seq)

    def fill(self) -> None:
        """Every prompt computed and cached, nothing in use."""
        self.reset()
        for step in (self.attach, self.reserve, self.advance, self.remember, self.free):
            step()


def operation_rates(prompt_blocks: int = 128, block_size: int = 16) -> list[OperationRate]:
    """Rates of the single operations, over prompts of ``prompt_blocks`` full blocks."""
    bench = _Bench(prompt_blocks, block_size)
    # operation -> what must have happened before it, what it does, what proves that it did
    steps: dict[str, tuple[list[Step], Step, Callable[[], bool]]] = {
        "hash a prompt": ([bench.reset], bench.reset, lambda: len(bench.chains[-1].keys) == prompt_blocks),
        "attach, miss": ([bench.reset], bench.attach, lambda: bench.manager.lengths[0] == 0),
        "reserve": ([bench.reset, bench.attach], bench.reserve, lambda: bench.manager.allocator.num_free == 0),
        "remember": (
            [bench.reset, bench.attach, bench.reserve, bench.advance],
            bench.remember,
            lambda: bench.prefix.num_cached == bench.count * prompt_blocks,
        ),
        "free, cached": (
            [bench.reset, bench.attach, bench.reserve, bench.advance, bench.remember],
            bench.free,
            lambda: bench.prefix.num_evictable == bench.count * prompt_blocks,
        ),
        "attach, hit": ([bench.fill], bench.attach, lambda: bench.manager.lengths[0] == bench.tokens - 1),
        "evict": ([bench.fill], bench.evict, lambda: bench.prefix.num_cached == 0),
        "fork": (
            [bench.reset, bench.attach, bench.reserve, bench.advance],
            bench.fork,
            lambda: bench.manager.allocator.refs[bench.manager.tables[0][0]] == 2,
        ),
    }
    rates = [
        OperationRate(name, prompt_blocks, us := _best(*how) / bench.count, us / prompt_blocks)
        for name, how in steps.items()
    ]
    return [*rates, _decode_churn(block_size)]


def _best(before: list[Step], timed: Step, proof: Callable[[], bool]) -> float:
    """Microseconds of the fastest of ROUNDS."""
    best = float("inf")
    for _ in range(ROUNDS):
        for prepare in before:
            prepare()
        began = time.perf_counter()
        timed()
        best = min(best, time.perf_counter() - began)
        if not proof():
            raise AssertionError("the timed operation did not do what it was timed for")
    return 1e6 * best


def _decode_churn(block_size: int, num_seqs: int = 128, steps: int = 64) -> OperationRate:
    """reserve and advance by one token for each of ``num_seqs`` running sequences: what every decode step does."""
    manager = KVCacheManager(num_seqs * (steps // block_size + 2), block_size)
    best = float("inf")
    for _ in range(ROUNDS):
        for seq in range(num_seqs):
            manager.create(seq)
        began = time.perf_counter()
        for _ in range(steps):
            for seq in range(num_seqs):
                manager.reserve(seq, 1)
                manager.advance(seq, 1)
        best = min(best, time.perf_counter() - began)
        for seq in range(num_seqs):
            manager.free(seq)
    us = 1e6 * best / (steps * num_seqs)
    return OperationRate("reserve + advance, one token", 1, us, us)
