"""Timed replay: the engine's scheduler on a virtual clock."""

from __future__ import annotations

import pytest

from pagedkv.cache.policies import POLICIES
from pagedkv.config import SchedulerConfig
from pagedkv.insight.step_cost import StepCost
from pagedkv.insight.timed import percentile, replay_timed
from pagedkv.insight.trace import Trace, TraceRequest


def shared_prefix(num_requests: int, *, gap: float = 0.05, outputs: int = 4) -> Trace:
    """Requests of 40 tokens that share their first 32 and arrive ``gap`` seconds apart."""
    requests = [TraceRequest(i * gap, 40, outputs, [0, 1, 2, 3, 100 + i]) for i in range(num_requests)]
    return Trace("made", 8, requests)


def test_every_request_is_answered_and_prefixes_are_hit() -> None:
    report = replay_timed(shared_prefix(20), num_blocks=64)
    assert report.num_refused == 0
    assert report.token_hit_rate == pytest.approx(19 * 32 / (20 * 40))
    assert report.output_throughput * report.duration == pytest.approx(20 * 4)
    assert 0.5 < report.utilization <= 1.0


def test_the_same_run_gives_the_same_figures() -> None:
    def run() -> dict[str, object]:
        report = replay_timed(shared_prefix(20), num_blocks=24).as_dict()
        return {name: value for name, value in report.items() if name not in ("wall_seconds", "us_per_step")}

    assert run() == run()


def test_time_is_what_the_steps_cost() -> None:
    trace = Trace("one", 8, [TraceRequest(0.0, 16, 3, [0, 1])])
    report = replay_timed(trace, num_blocks=8, cost=StepCost(1.0, 0.1, 0.01, 0.001))
    # a prefill of 16 tokens, then two decodes over 17 and 18 tokens
    assert report.num_steps == 3
    assert report.ttft_median == pytest.approx(1.0 + 1.6 + 0.136)
    assert report.duration == pytest.approx(3 * 1.0 + 0.1 * 18 + 0.01 * (17 + 18) + 0.001 * 136)


def test_arrivals_are_waited_for_and_speed_divides_them() -> None:
    trace = shared_prefix(5, gap=10.0)
    assert replay_timed(trace, num_blocks=64).duration > 40.0
    assert 4.0 < replay_timed(trace, num_blocks=64, speed=10.0).duration < 10.0


def test_a_small_pool_preempts_and_still_answers_everybody() -> None:
    trace = shared_prefix(12, gap=0.0, outputs=40)
    report = replay_timed(trace, num_blocks=16, config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64))
    assert report.preemptions > 0
    assert report.num_refused == 0
    assert report.output_throughput * report.duration == pytest.approx(12 * 40)


def test_a_request_that_can_never_fit_is_refused_and_counted() -> None:
    trace = Trace("big", 8, [TraceRequest(0.0, 80, 4, list(range(10))), TraceRequest(0.0, 8, 4, [0])])
    report = replay_timed(trace, num_blocks=6)
    assert report.num_refused == 1
    assert report.num_requests == 2


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_runs_under_the_scheduler(policy: str) -> None:
    trace = shared_prefix(30, gap=0.01)
    report = replay_timed(trace, num_blocks=12, policy=policy, config=SchedulerConfig(max_num_seqs=4))
    assert report.evictions > 0
    assert report.token_hit_rate > 0.3


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 2.0), (0.75, 3.0), (0.76, 4.0), (1.0, 4.0)])
def test_percentile_is_a_value_that_occurred(share: float, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == expected


def test_percentile_of_nothing() -> None:
    assert percentile([], 0.5) == 0.0
