from __future__ import annotations

from itertools import pairwise

import pytest

from pagedkv.errors import InvalidRequest
from pagedkv.insight.replay import replay_sequential
from pagedkv.insight.synthetic import CHUNK_TOKENS, MOST_CHUNKS, SYSTEM_PROMPTS, synthetic_trace


def test_the_same_seed_gives_the_same_traffic() -> None:
    assert synthetic_trace(50).requests == synthetic_trace(50).requests
    assert synthetic_trace(50).requests != synthetic_trace(50, seed=1).requests
    assert synthetic_trace(50).requests[:20] == synthetic_trace(20).requests


def test_lengths_fit_their_chunks_and_arrivals_are_in_order() -> None:
    trace = synthetic_trace(300)
    for request in trace.requests:
        assert 0 <= len(request.chunks) * CHUNK_TOKENS - request.num_prompt_tokens < CHUNK_TOKENS
        assert len(request.chunks) < MOST_CHUNKS + 4
    assert all(a.arrival < b.arrival for a, b in pairwise(trace.requests))


def test_chats_repeat_themselves_and_strangers_share_nothing() -> None:
    strangers = synthetic_trace(100, strangers=1.0)
    assert replay_sequential(strangers).num_hit_tokens == 0
    chats = synthetic_trace(300, open_chats=8, strangers=0.0)
    assert replay_sequential(chats).token_hit_rate > 0.7
    assert {tuple(request.chunks[:4]) for request in chats.requests} == {
        tuple(range(4 * i, 4 * i + 4)) for i in range(SYSTEM_PROMPTS)
    }


@pytest.mark.parametrize(
    ("values", "field"),
    [({"num_requests": 0}, "num_requests"), ({"open_chats": 0}, "open_chats"), ({"strangers": 1.5}, "strangers")],
)
def test_a_bad_value_is_named(values: dict[str, float], field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        synthetic_trace(**{"num_requests": 5, **values})  # type: ignore[arg-type]
