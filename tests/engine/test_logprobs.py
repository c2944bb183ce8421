"""Reported log-probabilities are those of the model itself, whatever the request filters."""

from __future__ import annotations

import math

import pytest
import torch

from pagedkv.engine.logprobs import PIECE, most_likely, prompt_logprobs
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.sampler import Sampler, SampleRow

VOCAB = 97


def some_logits(rows: int, seed: int = 4) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("number", [0, 1, 5, 20])
def test_values_ranks_and_order(number: int) -> None:
    logits = some_logits(6)
    exact = logits.double().log_softmax(-1)
    chosen = [3, 40, 96, 0, int(logits[4].argmax()), 7]
    for i, entry in enumerate(most_likely(logits, chosen, [number] * 6, token_text=str)):
        order = exact[i].argsort(descending=True).tolist()
        assert list(entry) == [chosen[i], *(t for t in order[:number] if t != chosen[i])]
        for token, logprob in entry.items():
            assert logprob.logprob == pytest.approx(exact[i, token].item(), abs=1e-5)
            assert logprob.rank == order.index(token) + 1
            assert logprob.decoded_token == str(token)


def test_rows_may_ask_for_different_numbers_and_ties_share_a_rank() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]] * 3)
    first, second, third = most_likely(logits, [2, 3, 0], [0, 2, 99])
    assert list(first) == [2]
    assert first[2].rank == 1
    assert list(second) == [3, 1, 2]
    assert [second[t].rank for t in (3, 1, 2)] == [4, 1, 1]
    assert list(third) == [0, 1, 2, 3]
    assert third[0].rank == 3


def test_b73_filters_do_not_reach_the_logprobs() -> None:
    logits = some_logits(4)
    exact = logits.log_softmax(-1)
    cases = [
        SamplingParams(logprobs=5, top_k=1),
        SamplingParams(logprobs=5, allowed_token_ids=[4, 5]),
        SamplingParams(logprobs=5, temperature=0, logit_bias={1: -100.0}),
        SamplingParams(logprobs=5, temperature=0.1, repetition_penalty=1.5, min_p=0.9),
    ]
    result = Sampler(VOCAB).sample(logits, [SampleRow(case, [1, 4], 1, seed=6) for case in cases])
    for i, entry in enumerate(result.logprobs):
        assert entry is not None
        assert next(iter(entry)) == result.token_ids[i]
        assert all(math.isfinite(logprob.logprob) for logprob in entry.values())
        for token, logprob in entry.items():
            assert logprob.logprob == pytest.approx(exact[i, token].item(), abs=1e-5)


def test_only_rows_that_ask_get_them_and_they_change_no_token() -> None:
    logits = some_logits(3)
    plain = [SampleRow(SamplingParams(), [1], 1, seed=s) for s in range(3)]
    asking = [plain[0], SampleRow(SamplingParams(logprobs=0), [1], 1, seed=1), plain[2]]
    result = Sampler(VOCAB).sample(logits, asking)
    assert result.token_ids == Sampler(VOCAB).sample(logits, plain).token_ids
    assert [None if entry is None else len(entry) for entry in result.logprobs] == [None, 1, None]


def test_b71_prompt_logprobs_do_not_depend_on_the_chunks() -> None:
    total = PIECE * 2 + 9
    logits, ids = some_logits(total), [t % VOCAB for t in range(total)]
    whole = prompt_logprobs(logits, ids, 2)
    pieces = [e for i in range(0, total, 50) for e in prompt_logprobs(logits[i : i + 50], ids[i : i + 50], 2)]
    assert whole == pieces
    assert len(whole) == total
    assert [next(iter(entry)) for entry in whole] == ids
    assert prompt_logprobs(logits[:0], [], 2) == []
