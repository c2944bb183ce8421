"""EngineStats: what the engine can say about itself, as one frozen record. Plain numbers; reading it costs O(1)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedkv.engine.outputs import FinishReason


@dataclass
class EngineCounts:
    """What the engine itself adds up; the scheduler and the runner keep their own."""

    num_steps: int = 0
    generated_tokens: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})
    num_failed: int = 0
    schedule_seconds: float = 0.0
    sample_seconds: float = 0.0
    commit_seconds: float = 0.0


@dataclass(frozen=True)
class EngineStats:
    """The engine now, and its totals since the start.

    num_running, num_waiting:      sequences that hold blocks; sequences that wait for them
    blocks_in_use, blocks_cached, blocks_free: a partition of ``num_blocks``; "cached": only the prefix cache holds them
    prefix_queries, prefix_hits:   prompt tokens that asked the cache, and those it had; each request counts once
    num_preemptions, recomputed_tokens: blocks taken away, and what was computed again because of it
    prefill_tokens, decode_tokens: positions computed (recomputed ones among the prefill tokens)
    generated_tokens:              tokens sampled
    num_twin_waits:                times a request was left waiting because another computed its next block
    evicted_blocks:                cached blocks given up for room
    allocated_blocks:              fresh blocks handed out;  copied_blocks: those of them for copy-on-write
    finished:                      requests by finish reason of their last sequence;  num_failed: ended by an error
    *_seconds:                     host time of all steps, by part
    exact:                         tokens do not depend, bit for bit, on what they are batched with (I9)
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    block_size: int
    blocks_in_use: int
    blocks_cached: int
    blocks_free: int
    prefix_queries: int
    prefix_hits: int
    num_preemptions: int
    recomputed_tokens: int
    prefill_tokens: int
    decode_tokens: int
    generated_tokens: int
    num_twin_waits: int
    evicted_blocks: int
    allocated_blocks: int
    copied_blocks: int
    finished: dict[FinishReason, int]
    num_failed: int
    num_steps: int
    schedule_seconds: float
    build_seconds: float
    forward_seconds: float
    sample_seconds: float
    commit_seconds: float
    exact: bool

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pool that running sequences hold, 0 to 1."""
        return self.blocks_in_use / self.num_blocks

    @property
    def prefix_hit_rate(self) -> float:
        """hits / queries, in tokens; 0 before the first query."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0
