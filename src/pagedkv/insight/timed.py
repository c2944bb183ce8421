"""Timed replay: recorded arrivals through the engine's own scheduler, with a model that only costs time.

The clock is virtual: each step takes what ``StepCost`` says and the next request comes when the trace says, so a day of
traffic runs in seconds and a run gives the same figures every time. Outputs are made up, one id each that nothing else
uses, and published as the engine publishes them.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from pagedkv.cache.manager import KVCacheManager
from pagedkv.cache.policies import make_policy
from pagedkv.cache.prefix import PrefixCache
from pagedkv.config import SchedulerConfig
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.request import Request, Sequence
from pagedkv.engine.scheduler import Scheduler
from pagedkv.insight.replay import Progress
from pagedkv.insight.step_cost import StepCost, StepShape
from pagedkv.insight.trace import Trace, TraceRequest

_FIRST_OUTPUT_ID = 1 << 31  # ids of runs of a trace are smaller


@dataclass(frozen=True)
class TimedReport:
    """What came of a timed replay. Times are in seconds of the virtual clock.

    token_hit_rate:  of prompt tokens at first admission;  evictions: blocks
    utilization:     tokens stored over slots held by running sequences, averaged over steps
    ttft_*, e2e_*:   time to first token and to the last one, from arrival
    wall_seconds:    real time that the scheduler and the cache took;  us_per_step: the same per step
    """

    trace: str
    policy: str
    block_size: int
    num_blocks: int
    num_requests: int
    num_refused: int
    num_steps: int
    token_hit_rate: float
    evictions: int
    preemptions: int
    recomputed_tokens: int
    utilization: float
    duration: float
    output_throughput: float
    ttft_median: float
    ttft_p90: float
    ttft_p99: float
    e2e_median: float
    e2e_p99: float
    wall_seconds: float
    us_per_step: float

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


@dataclass
class _Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class _Run:
    """The state of one timed replay."""

    trace: Trace
    scheduler: Scheduler
    prefix: PrefixCache
    cost: StepCost
    clock: _Clock
    ids: count[int] = field(default_factory=lambda: count(_FIRST_OUTPUT_ID))
    ttft: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    used: float = 0.0
    num_steps: int = 0
    num_refused: int = 0
    num_outputs: int = 0
    wall: float = 0.0

    def arrive(self, number: int, entry: TraceRequest, arrival: float) -> None:
        outputs = max(1, entry.num_output_tokens)
        if not self.scheduler.fits_pool(entry.num_prompt_tokens + outputs):
            self.num_refused += 1
            return
        prompt = self.trace.prompt(entry).tolist()
        request = Request(number, str(number), None, prompt, SamplingParams(max_tokens=outputs), outputs)
        request.metrics.arrival = arrival
        request.sequences.append(Sequence(request, 0, prompt.copy(), len(prompt)))
        self.scheduler.add(request.sequences[0])

    def step(self) -> None:
        """One step of the engine, less the model."""
        began = time.perf_counter()
        plan = self.scheduler.schedule()
        self.wall += time.perf_counter() - began
        for seq in plan.dry:
            self._finish(seq)
        if not plan.chunks:
            return
        self.num_steps += 1
        self.clock.now += self.cost.seconds(StepShape.of((start, n) for _, start, n in plan.chunks.values()))
        self._note_utilization()
        began = time.perf_counter()
        self.scheduler.commit(plan)
        self.wall += time.perf_counter() - began
        for seq, _, _ in plan.chunks.values():
            if seq.num_computed_tokens == seq.num_tokens:
                self._append(seq)

    def _append(self, seq: Sequence) -> None:
        seq.tokens.append(next(self.ids))
        self.num_outputs += 1
        metrics = seq.request.metrics
        if metrics.first_token is None:
            metrics.first_token = self.clock.now
            self.ttft.append(self.clock.now - metrics.arrival)
        if seq.num_output_tokens >= seq.request.max_new_tokens:
            self._finish(seq)

    def _finish(self, seq: Sequence) -> None:
        self.scheduler.remove(seq)
        self.e2e.append(self.clock.now - seq.request.metrics.arrival)

    def _note_utilization(self) -> None:
        manager = self.scheduler.manager
        slots = sum(map(len, manager.tables.values())) * manager.block_size
        self.used += sum(manager.lengths.values()) / slots if slots else 1.0


def replay_timed(
    trace: Trace,
    *,
    num_blocks: int,
    block_size: int | None = None,
    policy: str = "lru",
    config: SchedulerConfig | None = None,
    cost: StepCost | None = None,
    speed: float = 1.0,
    progress: Progress | None = None,
) -> TimedReport:
    """Runs the trace through the real scheduler, manager and prefix cache on a virtual clock.

    speed: arrivals come this many times as fast as recorded
    A request that can never fit in the pool is refused, as the engine does, and counted.
    """
    size = trace.chunk_tokens if block_size is None else block_size
    manager, clock = KVCacheManager(num_blocks, size), _Clock()
    prefix = PrefixCache(manager, policy=make_policy(policy), clock=clock)
    scheduler = Scheduler(config or SchedulerConfig(), manager, prefix)
    run = _Run(trace, scheduler, prefix, cost or StepCost(), clock)
    at, total = 0, len(trace.requests)
    while at < total or scheduler.running or scheduler.waiting:
        while at < total and trace.requests[at].arrival / speed <= clock.now:
            run.arrive(at, trace.requests[at], trace.requests[at].arrival / speed)
            at += 1
        if scheduler.running or scheduler.waiting:
            run.step()
        elif at < total:
            clock.now = trace.requests[at].arrival / speed
        if progress is not None:
            progress(len(run.e2e) + run.num_refused, total)
    counts = scheduler.counts
    return TimedReport(
        trace=trace.name,
        policy=policy,
        block_size=size,
        num_blocks=num_blocks,
        num_requests=total,
        num_refused=run.num_refused,
        num_steps=run.num_steps,
        token_hit_rate=counts.prefix_hits / max(1, counts.prefix_queries),
        evictions=prefix.stats.evicted_blocks,
        preemptions=counts.num_preemptions,
        recomputed_tokens=counts.num_recomputed_tokens,
        utilization=run.used / max(1, run.num_steps),
        duration=clock.now,
        output_throughput=run.num_outputs / max(clock.now, 1e-9),
        ttft_median=percentile(run.ttft, 0.5),
        ttft_p90=percentile(run.ttft, 0.9),
        ttft_p99=percentile(run.ttft, 0.99),
        e2e_median=percentile(run.e2e, 0.5),
        e2e_p99=percentile(run.e2e, 0.99),
        wall_seconds=run.wall,
        us_per_step=1e6 * run.wall / max(1, run.num_steps),
    )


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]
