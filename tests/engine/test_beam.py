"""The policy of beam search, without an engine: against a plain beam, an exhaustive search and transformers."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lone_beams import Model, search
from torch import Tensor

from pagedkv.engine.beam import BeamSearch, top_candidates
from pagedkv.engine.params import BeamSearchParams

Scored = tuple[list[int], float]


def fake_model(vocab: int, seed: int = 0, eos_bonus: float = 0.0, eos: Sequence[int] = ()) -> Model:
    """Logits that depend on the whole history."""

    def logits(tokens: Sequence[int]) -> Tensor:
        digest = hashlib.sha256(repr((seed, list(tokens))).encode()).digest()
        values = torch.randn(vocab, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))) * 1.5
        values[list(eos)] += eos_bonus
        return values

    return logits


def plain_beam(
    model: Model, width: int, length: int, eos: Sequence[int], penalty: float
) -> list[tuple[list[int], float]]:
    """By whole lists and all W x V continuations."""
    running: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[tuple[list[int], float]] = []
    keep = max(2, 1 + len(eos)) * width
    for step in range(1, length + 1):
        grown = [
            ([*tokens, token], total + value)
            for tokens, total in running
            for token, value in enumerate(model(tokens).log_softmax(-1).tolist())
        ]
        grown = sorted(grown, key=lambda one: -one[1])[:keep]
        ends = [
            (tokens, total / step**penalty) for tokens, total in grown[:width] if tokens[-1] in eos or step == length
        ]
        finished = sorted([*finished, *ends], key=lambda one: -one[1])[:width]
        running = [one for one in grown if one[0][-1] not in eos][:width]
        if len(finished) == width and running and running[0][1] / step**penalty <= finished[-1][1]:
            break
        if not running:
            break
    return finished


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("penalty", [1.0, 0.0, -1.0, 2.0])
@pytest.mark.parametrize("eos", [(), (3,), (3, 5, 6)])
def test_b30_equals_a_plain_beam(width: int, penalty: float, eos: tuple[int, ...]) -> None:
    for seed, vocab, length in itertools.product(range(3), (3, 11, 40), (1, 2, 9)):
        ends = [token for token in eos if token < vocab]
        model = fake_model(vocab, seed, eos_bonus=1.0, eos=ends)
        params = BeamSearchParams(width, length, length_penalty=penalty)
        found = search(model, params, ends)
        expected = plain_beam(model, width, length, ends, penalty)
        assert [one.tokens for one in found] == [tokens for tokens, _ in expected]
        assert [one.score for one in found] == pytest.approx([score for _, score in expected], abs=1e-4)


def test_b30_width_one_is_greedy() -> None:
    model = fake_model(50, eos_bonus=2.0, eos=[7])
    greedy: list[int] = []
    while len(greedy) < 12 and (not greedy or greedy[-1] != 7):
        greedy.append(int(model(greedy).argmax()))
    best = search(model, BeamSearchParams(1, 12), [7])
    assert [one.tokens for one in best] == [greedy]


def test_b30_a_wide_beam_finds_the_best_of_all() -> None:
    model, vocab, length = fake_model(4, seed=3), 4, 3
    totals = {
        tokens: sum(model(tokens[:i]).log_softmax(-1)[token].item() for i, token in enumerate(tokens))
        for tokens in itertools.product(range(vocab), repeat=length)
    }
    found = search(model, BeamSearchParams(vocab**length, length))
    assert len(found) == vocab**length
    assert tuple(found[0].tokens) == max(totals, key=lambda tokens: totals[tokens])
    for one in found:
        assert one.cumulative_logprob == pytest.approx(totals[tuple(one.tokens)], abs=1e-5)
        assert one.score == pytest.approx(one.cumulative_logprob / length, abs=1e-6)


def test_b30_width_above_the_vocabulary() -> None:
    model = fake_model(3, seed=1, eos_bonus=1.0, eos=[2])
    assert len(search(model, BeamSearchParams(8, 1), [2])) == 3
    found = search(model, BeamSearchParams(8, 4), [2])
    assert len(found) == 8
    assert len({tuple(one.tokens) for one in found}) == 8


def test_reasons_and_ignore_eos() -> None:
    model = fake_model(20, seed=2, eos_bonus=3.0, eos=[4])
    found = search(model, BeamSearchParams(4, 6), [4])
    for one in found:
        assert one.finish_reason == ("stop" if one.tokens[-1] == 4 else "length")
        assert 4 not in one.tokens[:-1]
    assert {one.finish_reason for one in found} >= {"stop"}
    ignoring = search(model, BeamSearchParams(4, 6, ignore_eos=True), [4])
    assert {(len(one.tokens), one.finish_reason) for one in ignoring} == {(6, "length")}
    assert any(4 in one.tokens for one in ignoring)


def test_a_search_that_is_cut_short_keeps_what_runs() -> None:
    beam = BeamSearch(BeamSearchParams(2, 9), [9], 9)
    assert beam.hypotheses() == []
    beam.step([[(1, -0.1), (2, -2.0)]])
    beam.step([[(9, -0.1), (3, -0.5)], [(4, -0.2)]])
    beam.close()
    assert [(one.tokens, one.finish_reason) for one in beam.hypotheses()] == [([1, 9], "stop"), ([1, 3], "length")]
    untouched = BeamSearch(BeamSearchParams(2, 9), [], 9)
    untouched.close()
    assert untouched.hypotheses() == []


def test_moves_name_the_parent_of_each_beam() -> None:
    beam = BeamSearch(BeamSearchParams(3, 5), [], 5)
    assert beam.step([[(5, -3.0), (6, -1.0), (7, -2.0), (8, -9.0)]]) == [(0, 6), (0, 7), (0, 5)]
    assert beam.step([[(1, -5.0)], [(1, -0.5), (2, -0.6)], [(1, -math.inf)]]) == [(1, 1), (1, 2), (0, 1)]
    with pytest.raises(ValueError, match="3 beams"):
        beam.step([[(1, 0.0)]])


def test_candidates_are_log_probabilities_of_known_ids() -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    logits[:, 15:] = 99.0
    exact = logits[:, :15].log_softmax(-1)
    for row, own in enumerate(top_candidates(logits, 6, num_ids=15)):
        assert [token for token, _ in own] == exact[row].argsort(descending=True)[:6].tolist()
        assert [value for _, value in own] == pytest.approx([exact[row, token].item() for token, _ in own])
    halved = top_candidates(logits, 99, 2.0, num_ids=15)
    assert [len(own) for own in halved] == [15] * 3
    assert halved[0][0][1] == pytest.approx((logits[0, :15] / 2).log_softmax(-1).max().item())


@pytest.mark.parametrize(("penalty", "num_eos"), [(0.0, 1), (-1.0, 3)])
def test_b30_equals_transformers(tiny_model: Callable[..., Path], penalty: float, num_eos: int) -> None:
    transformers: Any = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32).eval()
    prompt = [30, 31, 99, 250, 17]

    def logits(tokens: Sequence[int]) -> Tensor:
        with torch.no_grad():
            return torch.as_tensor(model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].float())

    free = search(logits, BeamSearchParams(4, 12))
    eos = [free[0].tokens[i] for i in (3, 5, 7)][:num_eos]  # what the model likes to say, so that beams do end
    for width in (2, 4):
        theirs = model.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            early_stopping=False,
            length_penalty=penalty,
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=eos or None,
            pad_token_id=1,
            return_dict_in_generate=True,
            output_scores=True,
        )
        ours = search(logits, BeamSearchParams(width, 12, length_penalty=penalty), eos)
        assert any(len(one.tokens) < 12 for one in ours) or not eos or penalty > 0  # the case is not idle
        assert [one.score for one in ours] == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-4)
        for one, row in zip(ours, theirs.sequences[:, len(prompt) :].tolist(), strict=True):
            assert one.tokens == row[: len(one.tokens)]
            assert set(row[len(one.tokens) :]) <= {1}
