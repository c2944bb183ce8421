"""Replay: the real manager and cache against counts made independently, and the optimum against every choice."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.cache.policies import POLICIES
from pagedkv.errors import InvalidRequest
from pagedkv.insight.optimum import optimum_hits, unlimited_hits
from pagedkv.insight.replay import replay_sequential
from pagedkv.insight.trace import Trace, TraceRequest


def make_trace(lengths_and_ids: list[tuple[int, list[int]]], chunk_tokens: int = 4) -> Trace:
    requests = [TraceRequest(float(i), n, 1, ids) for i, (n, ids) in enumerate(lengths_and_ids)]
    return Trace("made", chunk_tokens, requests)


def conversations(seed: int, num_requests: int, *, num_users: int = 12, chunk_tokens: int = 4) -> Trace:
    """Users whose every turn continues their own conversation after one of two system prompts; some come once only."""
    draw = random.Random(seed)
    fresh = iter(range(2, 10**6))
    texts = {user: [user % 2] for user in range(num_users)}
    made: list[tuple[int, list[int]]] = []
    for _ in range(num_requests):
        user = min(draw.randrange(num_users), draw.randrange(num_users))
        if draw.random() < 0.3:
            ids = [next(fresh) for _ in range(draw.randint(1, 4))]
        else:
            ids = texts[user] = [*texts[user], *(next(fresh) for _ in range(draw.randint(1, 2)))]
            if len(ids) > 9:
                texts[user] = [user % 2]
        made.append((len(ids) * chunk_tokens - draw.randint(0, chunk_tokens - 1), ids))
    return make_trace(made, chunk_tokens)


def plain_lru_hits(trace: Trace, num_blocks: int) -> int:
    """LRU over block identities, written down once more without manager or cache, at the trace's own block size."""
    size = trace.chunk_tokens
    order: dict[tuple[int, int], None] = {}
    hits = 0
    for request in trace.requests:
        pairs = trace.blocks(request, size)
        most = (request.num_prompt_tokens - 1) // size
        found = next((i for i, pair in enumerate(pairs[:most]) if pair not in order), most)
        hits += found * size
        held = set(pairs)
        needed = -(-request.num_prompt_tokens // size)
        room = num_blocks - (needed - sum(pair in order for pair in pairs))
        for pair in [pair for pair in order if pair not in held]:
            if len(order) <= room:
                break
            del order[pair]
        for pair in reversed(pairs):
            order.pop(pair, None)
            order[pair] = None
    return hits


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_blocks", [12, 20, 40])
def test_lru_replay_agrees_with_an_lru_written_down_once_more(seed: int, num_blocks: int) -> None:
    trace = conversations(seed, 120)
    report = replay_sequential(trace, num_blocks=num_blocks)
    assert report.num_hit_tokens == plain_lru_hits(trace, num_blocks)
    assert report.evictions > 0


@pytest.mark.parametrize("block_size", [2, 3, 4, 8])
def test_without_limit_the_real_cache_hits_what_was_counted_without_it(block_size: int) -> None:
    trace = conversations(1, 150)
    report = replay_sequential(trace, block_size=block_size)
    assert report.num_hit_tokens == unlimited_hits(trace, block_size)
    assert report.evictions == 0
    assert report.token_hit_rate == report.infinite_hit_rate == report.optimum_hit_rate > 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("num_blocks", [12, 24])
def test_no_policy_beats_the_optimum(policy: str, num_blocks: int) -> None:
    trace = conversations(7, 150)
    report = replay_sequential(trace, num_blocks=num_blocks, policy=policy)
    assert report.token_hit_rate <= report.optimum_hit_rate <= report.infinite_hit_rate
    assert report.num_refused == 0


def best_of_all_choices(trace: Trace, num_blocks: int) -> int:
    """The most tokens that evictions, leaves first, can hit, by trying every sequence of them (small traces only)."""
    size = trace.chunk_tokens
    parents: dict[tuple[int, int], tuple[int, int]] = {}
    for request in trace.requests:
        pairs = trace.blocks(request, size)
        parents.update(zip(pairs[1:], pairs, strict=False))

    @cache
    def best(at: int, cached: frozenset[tuple[int, int]]) -> int:
        if at == len(trace.requests):
            return 0
        request = trace.requests[at]
        pairs = trace.blocks(request, size)
        needed = -(-request.num_prompt_tokens // size)
        if needed > num_blocks:
            return best(at + 1, cached)
        most = (request.num_prompt_tokens - 1) // size
        found = next((i for i, pair in enumerate(pairs[:most]) if pair not in cached), most)
        over = len(cached) + needed - sum(pair in cached for pair in pairs) - num_blocks
        held = frozenset(pairs)
        return found * size + max(best(at + 1, kept | held) for kept in choices(cached, held, max(0, over)))

    def choices(
        cached: frozenset[tuple[int, int]], held: frozenset[tuple[int, int]], over: int
    ) -> list[frozenset[tuple[int, int]]]:
        if over == 0:
            return [cached]
        leaves = [pair for pair in cached - held if not any(parents.get(other) == pair for other in cached)]
        kept = {cached - {pair} for pair in leaves}
        return [choice for each in kept for choice in choices(each, held, over - 1)]

    return best(0, frozenset())


@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=1, max_size=3)), min_size=2, max_size=7),
    st.integers(3, 5),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_optimum_is_what_trying_every_eviction_gives(
    plan: list[tuple[int, list[int]]], num_blocks: int, end_inside: bool
) -> None:
    """Never more, and equal where no prompt ends exactly with a block (``optimum_hits`` says why)."""
    numbers: dict[tuple[int, ...], int] = {}
    made = []
    for short, path in plan:
        ids = [numbers.setdefault(tuple(path[: i + 1]), len(numbers)) for i in range(len(path))]
        made.append((len(ids) * 3 - max(short, end_inside), ids))
    trace = make_trace(made, chunk_tokens=3)
    ours, best = optimum_hits(trace, 3, num_blocks), best_of_all_choices(trace, num_blocks)
    assert ours == best if end_inside else ours <= best


def test_a_request_larger_than_the_pool_is_counted_and_the_rest_goes_on() -> None:
    trace = make_trace([(8, [0, 1]), (40, list(range(10, 20))), (9, [0, 1, 2])])
    report = replay_sequential(trace, num_blocks=4)
    assert report.num_refused == 1
    assert report.num_hit_tokens == 8


def test_figures_of_a_small_trace_worked_out_by_hand() -> None:
    trace = make_trace([(8, [0, 1]), (8, [0, 1]), (10, [0, 1, 2])])
    report = replay_sequential(trace)
    # nothing, then one block (one token is left to compute), then both
    assert report.num_hit_tokens == 0 + 4 + 8
    assert report.token_hit_rate == pytest.approx(12 / 26)
    assert report.block_references == 2 + 2 + 2
    assert report.num_cached == 2
    assert report.utilization == pytest.approx(26 / 28)
    assert report.as_dict()["policy"] == "lru"


def test_progress_is_told_of_every_request() -> None:
    seen: list[tuple[int, int]] = []
    replay_sequential(make_trace([(4, [0]), (4, [1])]), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


def test_a_policy_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="mru"):
        replay_sequential(make_trace([(4, [0])]), policy="mru")
