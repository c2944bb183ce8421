"""replay: what the block manager and the prefix cache would do with recorded traffic.

Drives the code that the engine runs, ``KVCacheManager`` and ``PrefixCache``: requests one after another in file order,
prompts only, no clock. Beside it stand two yardsticks computed without that code: what a cache without limit would
hit, and what Belady's optimum (which knows the future) would hit with the same pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from pagedkv.cache.manager import KVCacheManager
from pagedkv.cache.policies import QueueAware, make_policy
from pagedkv.cache.prefix import PrefixCache
from pagedkv.errors import InvalidRequest, OutOfBlocks
from pagedkv.insight.optimum import optimum_hits, unlimited_hits
from pagedkv.insight.trace import Trace, TraceRequest

Progress = Callable[[int, int], None]  # (requests done, of how many)
QUEUE = 16  # how many of the next requests a queue-aware policy sees


@dataclass(frozen=True)
class ReplayReport:
    """What came of one replay. Rates are shares of the prompt tokens of all requests, from 0 to 1.

    num_blocks:         of the pool; for a pool without limit, what was ever in use
    num_refused:        requests whose prompt alone is larger than the pool; their tokens count as not hit
    evictions:          blocks; preemptions: always 0 one after another
    utilization:        tokens of running prompts over the slots of their blocks
    block_references:   full blocks of all prompts, hit or not; num_cached: blocks under a key at the end
    seconds:            of processor time in the driven code; us_per_block: microseconds of it per block reference
    """

    trace: str
    policy: str
    block_size: int
    num_blocks: int
    limited: bool
    num_requests: int
    num_refused: int
    num_prompt_tokens: int
    num_hit_tokens: int
    token_hit_rate: float
    infinite_hit_rate: float | None
    optimum_hit_rate: float | None
    evictions: int
    preemptions: int
    utilization: float
    block_references: int
    num_cached: int
    seconds: float
    us_per_block: float

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


@dataclass
class _Counts:
    """What a run adds up."""

    hits: int = 0
    slots: int = 0
    stored: int = 0
    refused: int = 0
    references: int = 0


def replay_sequential(
    trace: Trace,
    *,
    num_blocks: int | None = None,
    block_size: int | None = None,
    policy: str = "lru",
    yardsticks: bool = True,
    progress: Progress | None = None,
) -> ReplayReport:
    """Runs every request of the trace through the real manager and prefix cache, one after another.

    num_blocks:  of the pool; None: as many as the trace can ever fill, so nothing is evicted
    block_size:  tokens; None: the trace's own
    yardsticks:  False leaves the infinite and the optimum hit rate out (None then): they take longer than the
                 replay where blocks are small

    Only full blocks count as hits and one token of each prompt is computed, as in the engine. What a prompt shares
    with a block beyond the last full one (a partial hit) is not counted, since a trace says nothing below its runs.
    """
    size = trace.chunk_tokens if block_size is None else block_size
    limited = num_blocks is not None
    pool = num_blocks if num_blocks is not None else _blocks_ever(trace, size)
    manager = KVCacheManager(pool, size)
    prefix = PrefixCache(manager, policy=make_policy(policy))
    counts, seconds, total = _Counts(), 0.0, len(trace.requests)
    for number, request in enumerate(trace.requests):
        if isinstance(prefix.policy, QueueAware) and limited:
            prefix.policy.expect(_wanted(prefix, trace, trace.requests[number + 1 : number + 1 + QUEUE]))
        prompt = trace.prompt(request).tolist()  # a list, as it comes from a tokenizer
        began = time.thread_time()
        _run_one(manager, prefix, number, prompt, counts)
        seconds += time.thread_time() - began
        if progress is not None:
            progress(number + 1, total)
    tokens = trace.num_prompt_tokens
    unlimited = unlimited_hits(trace, size) / tokens if yardsticks else None
    optimum = optimum_hits(trace, size, pool) / tokens if yardsticks and limited else unlimited
    return ReplayReport(
        trace=trace.name,
        policy=policy,
        block_size=size,
        num_blocks=pool,
        limited=limited,
        num_requests=total,
        num_refused=counts.refused,
        num_prompt_tokens=tokens,
        num_hit_tokens=counts.hits,
        token_hit_rate=counts.hits / tokens,
        infinite_hit_rate=unlimited,
        optimum_hit_rate=optimum,
        evictions=prefix.stats.evicted_blocks,
        preemptions=0,
        utilization=counts.stored / counts.slots if counts.slots else 0.0,
        block_references=counts.references,
        num_cached=prefix.num_cached,
        seconds=seconds,
        us_per_block=1e6 * seconds / max(1, counts.references),
    )


def _run_one(manager: KVCacheManager, prefix: PrefixCache, seq: int, prompt: Any, counts: _Counts) -> None:
    """One request as the engine runs it, less the model: attach, make room, compute, publish, leave."""
    size, length = manager.block_size, len(prompt)
    counts.references += length // size
    needed = manager.blocks_needed(length)
    if needed > manager.allocator.num_blocks:
        counts.refused += 1
        return
    chain = prefix.chain()
    chain.extend(prompt)
    reused = prefix.attach(seq, prompt, chain=chain)
    fresh = manager.blocks_to_reserve(seq, length - reused)
    if fresh > manager.allocator.num_free:
        prefix.evict(fresh)
    try:
        manager.reserve(seq, length - reused)
    except OutOfBlocks as error:
        raise InvalidRequest(f"request {seq} of {needed} blocks did not fit: {error}", field="blocks") from error
    manager.advance(seq, length - reused)
    prefix.remember(seq, chain)
    manager.free(seq)
    counts.hits += reused // size * size
    counts.slots += needed * size
    counts.stored += length


def _wanted(prefix: PrefixCache, trace: Trace, waiting: Iterable[TraceRequest]) -> set[int]:
    """The cached blocks that the next requests would attach."""
    return {block for request in waiting for block in prefix.match(trace.prompt(request)).blocks}


def _blocks_ever(trace: Trace, block_size: int) -> int:
    """An upper bound of the blocks that a trace can fill at once when nothing is evicted."""
    distinct = len({pair for request in trace.requests for pair in trace.blocks(request, block_size)})
    longest = max(request.num_prompt_tokens for request in trace.requests)
    return distinct + -(-longest // block_size) + 1
