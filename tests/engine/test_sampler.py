"""The batched sampler against a plain reference that treats one row at a time in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.engine.draw import uniform
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.sampler import Sampler, SampleRow, encode_bad_words, request_seed

EOS = 3
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
MIXED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1e-12},
    {"temperature": 1e-5},
    {"temperature": 1.0},
    {"temperature": 100.0},
    {"top_k": 1},
    {"top_k": 5, "temperature": 0.7},
    {"top_k": 100},
    {"top_k": 10**9},
    {"top_p": 0.0},
    {"top_p": 1e-9},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 3.0},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 0.001, "top_p": 0.95, "temperature": 2.0},
    {"top_k": 70, "top_p": 0.8, "min_p": 0.01},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3, "temperature": 0},
    {"repetition_penalty": 0.5, "top_k": 20},
    {"logit_bias": {7: 100.0}},
    {"logit_bias": {1: -100.0, 2: 5.0}, "top_p": 0.5},
    {"allowed_token_ids": [5, 9, 11]},
    {"min_tokens": 9, "max_tokens": 20, "stop_token_ids": [6, 8]},
]


def make_row(vocab: int = 300, **params: Any) -> SampleRow:
    tokens = [1, 5, 5, 9, 40, 2, 2, 2, 9]
    return SampleRow(
        SamplingParams(**params), [t % vocab for t in tokens], 5, seed=params.get("seed", 17), eos_ids=[EOS]
    )


def reference_logits(logits: Sequence[float], row: SampleRow) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What is left before temperature: extras and penalties, one id at a time."""
    params, outputs = row.params, list(row.tokens[row.num_prompt_tokens :])
    x = np.asarray(logits, dtype=np.float64).copy()
    for token in range(len(x)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            x[token] = -math.inf
        if len(outputs) < params.min_tokens and token in (EOS, *params.stop_token_ids):
            x[token] = -math.inf
        for word in row.bad_words:
            if token == word[-1] and (outputs[len(outputs) - len(word) + 1 :] == list(word[:-1])):
                x[token] = -math.inf
        x[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in row.tokens:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        x[token] -= params.frequency_penalty * outputs.count(token) + params.presence_penalty * (token in outputs)
    return x


def reference_probs(logits: Sequence[float], row: SampleRow) -> np.ndarray[Any, np.dtype[np.float64]]:
    params = row.params
    x = reference_logits(logits, row) / params.temperature
    p = np.exp(x - x.max())
    p[p < params.min_p] = 0
    order = np.argsort(-p, kind="stable")
    if 0 < params.top_k < len(p):
        p[p < p[order[params.top_k - 1]]] = 0
    p /= p.sum()
    mass = 0.0
    for token in order:
        if mass >= params.top_p and mass > 0:
            p[token] = 0
        mass += p[token]
    return p / p.sum()


def reference_token(logits: Sequence[float], row: SampleRow) -> tuple[int, float]:
    """(token, how near the random number is to a border between two tokens)"""
    if row.params.greedy:
        return int(np.argmax(reference_logits(logits, row))), 1.0
    reached = np.cumsum(reference_probs(logits, row))
    chance = uniform(row.seed, row.index, row.num_outputs)
    return int(np.searchsorted(reached, chance, side="right")), float(np.abs(reached - chance).min())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [300, 8193])
def test_mixed_batch_equals_the_reference(vocab: int, device: str) -> None:
    logits = torch.randn(len(MIXED), vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    rows = [make_row(vocab, **params, logprobs=2) for params in MIXED]
    result = Sampler(vocab).sample(logits.to(device), rows)
    assert result.errors == [None] * len(rows)
    near = 0
    for i, row in enumerate(rows):
        expected, distance = reference_token(logits[i].tolist(), row)
        near += distance < 1e-6
        assert result.token_ids[i] == expected or distance < 1e-6, MIXED[i]
    assert near <= 1


sampling = st.builds(
    dict,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 3, 64, 65, 199]),
    top_p=st.sampled_from([0.0, 0.2, 0.7, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5]),
    presence_penalty=st.sampled_from([0.0, -1.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.6]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=40, deadline=None)
@given(
    params=st.lists(sampling, min_size=1, max_size=6), scale=st.sampled_from([0.1, 1.0, 6.0]), seed=st.integers(0, 99)
)
def test_any_batch_equals_the_reference(params: list[dict[str, Any]], scale: float, seed: int) -> None:
    logits = torch.randn(len(params), 200, generator=torch.Generator().manual_seed(seed)) * scale
    rows = [make_row(200, **one) for one in params]
    tokens = Sampler(200).sample(logits, rows).token_ids
    for i, row in enumerate(rows):
        expected, distance = reference_token(logits[i].tolist(), row)
        assert tokens[i] == expected or distance < 1e-6


@pytest.mark.parametrize(("vocab", "draws"), [(1003, 12), (33_000, 1)])
def test_a_row_does_not_depend_on_the_batch(vocab: int, draws: int) -> None:
    """Nor on its place in it, on the neighbours' parameters, or on the layout of the logits (33,000: two threads)."""
    generator, sampler = torch.Generator().manual_seed(5), Sampler(vocab)
    for seed in range(draws):
        logits = torch.randn(len(MIXED), vocab, generator=generator) * 2
        rows = [make_row(vocab, **{**params, "seed": seed}) for params in MIXED]
        alone = [sampler.sample(logits[i : i + 1].clone(), [row]).token_ids[0] for i, row in enumerate(rows)]
        assert sampler.sample(logits, rows).token_ids == alone
        assert sampler.sample(logits.flip(0), rows[::-1]).token_ids == alone[::-1]
        assert sampler.sample(logits[3:9], rows[3:9]).token_ids == alone[3:9]
        wide = torch.nn.functional.pad(logits, (0, 77), value=99.0)[:, :vocab]
        assert sampler.sample(wide, rows).token_ids == alone


def test_weights_of_a_row_are_bitwise_those_of_the_row_alone() -> None:
    from pagedkv.engine.draw import keep_thresholds
    from pagedkv.engine.rowwise import weigh

    logits = torch.randn(7, 5003, generator=torch.Generator().manual_seed(1)) * 4
    best, inverse = logits.amax(-1), torch.linspace(0.3, 2, 7)
    params = [SamplingParams(top_p=0.99, temperature=1 / value) for value in inverse.tolist()]
    together = weigh(logits, best, inverse)
    limits = keep_thresholds(logits, best, inverse, together.sum(-1).double(), params)
    for i in range(7):
        one = slice(i, i + 1)
        alone = weigh(logits[one].clone(), best[one], inverse[one])
        assert torch.equal(alone[0], together[i])
        limit = keep_thresholds(logits[one], best[one], inverse[one], alone.sum(-1).double(), params[one])
        assert torch.equal(limit[0], limits[i])


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}, {"frequency_penalty": 1.0}],
    ids=str,
)
def test_draws_follow_the_exact_probabilities(params: dict[str, Any]) -> None:
    """Chi-square over 8,000 samples with a fixed seed; the bound is about the 0.9999 quantile."""
    draws, vocab = 8_000, 12
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(8)) * 2
    tokens = [5, 7, 7]
    probs = reference_probs(logits.tolist(), SampleRow(SamplingParams(**params), tokens, 1, seed=3, eos_ids=[EOS]))
    rows = [SampleRow(SamplingParams(**params), tokens, 1, seed=3, index=i, eos_ids=[EOS]) for i in range(draws)]
    counts = np.bincount(Sampler(vocab).sample(logits.expand(draws, -1), rows).token_ids, minlength=vocab)
    assert (counts[probs == 0] == 0).all()
    expected = probs[probs > 0] * draws
    statistic = ((counts[probs > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 8


def test_random_numbers_are_uniform_and_independent_of_neighbours() -> None:
    numbers = np.array([[uniform(seed, index, p) for p in range(500)] for seed in (0, 1) for index in (0, 1)])
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert len(np.unique(numbers)) == numbers.size
    assert abs(numbers.mean() - 0.5) < 0.03
    assert np.abs(np.corrcoef(numbers) - np.eye(4)).max() < 0.15


def test_b35_preemption_changes_nothing_because_there_is_no_state() -> None:
    """A row that is made anew in the middle, as after a preemption, goes on with the same tokens."""
    sampler, generator = Sampler(100), torch.Generator().manual_seed(2)
    steps = torch.randn(12, 1, 100, generator=generator)
    params = SamplingParams(seed=5, frequency_penalty=0.5, repetition_penalty=1.2, top_p=0.9)

    def run(restarts: set[int]) -> list[int]:
        tokens = [4, 8]
        row = SampleRow(params, tokens, 2, seed=request_seed(params, 0, 0))
        for step, logits in enumerate(steps):
            if step in restarts:
                row = SampleRow(params, tokens, 2, seed=request_seed(params, 0, 0))
            tokens.append(sampler.sample(logits, [row]).token_ids[0])
        return tokens

    assert run(set()) == run({1, 5, 11}) == run(set(range(12)))


def test_samples_of_one_prompt_differ_and_repeat() -> None:
    logits = torch.zeros(1, 1000)
    row = make_row(1000, seed=9)
    forks = [row, *(row.fork(list(row.tokens), index) for index in range(1, 4))]
    first = Sampler(1000).sample(logits.expand(4, -1), forks).token_ids
    assert len(set(first)) == 4
    assert Sampler(1000).sample(logits.expand(4, -1), forks).token_ids == first
    assert Sampler(1000).sample(logits, [forks[2]]).token_ids == first[2:3]


def test_seed_of_a_request() -> None:
    assert request_seed(SamplingParams(seed=7), 0, 1) == request_seed(SamplingParams(seed=7), 5, 9) == 7
    unseeded = {request_seed(SamplingParams(), engine, key) for engine in (0, 1) for key in (0, 1, 2)}
    assert len(unseeded) == 6
    assert request_seed(SamplingParams(), 1, 2) == request_seed(SamplingParams(seed=-1), 1, 2)


@pytest.mark.parametrize("vocab", [8193, 10_000, 151_936])
def test_b63_never_an_id_past_the_vocabulary(vocab: int) -> None:
    known = vocab - 267 if vocab == 151_936 else vocab
    logits = torch.full((8, vocab), -torch.inf)
    logits[:, known - 1] = 0.0  # the last id that has a text
    logits[:, known:] = 50.0  # padding that would win
    cases: list[dict[str, Any]] = [
        {"temperature": 0},
        {},
        {"top_k": 10**6},
        {"top_p": 0.0},
        {"top_p": 1e-9},
        {"min_p": 0.5},
        {"allowed_token_ids": [known - 1]},
        {"repetition_penalty": 1.5, "logit_bias": {known - 1: -100.0}},
    ]
    rows = [SampleRow(SamplingParams(**case), [0, vocab - 1], 1, seed=1) for case in cases]
    result = Sampler(vocab, num_decodable=known).sample(logits, rows)
    assert result.token_ids == [known - 1] * 8
    assert result.errors == [None] * 8


def test_b63_extras_that_name_ids_past_the_tokenizer_are_harmless() -> None:
    params = SamplingParams(
        logit_bias={9: 100.0, 10: 100.0},
        allowed_token_ids=[8, 10, 11],
        stop_token_ids=[11],
        min_tokens=5,
        presence_penalty=1.0,
    )
    row = SampleRow(params, [10, 11, 11], 1, seed=1)
    assert Sampler(12, num_decodable=10).sample(torch.zeros(1, 12), [row]).token_ids == [8]


def test_b74_one_bad_row_is_an_error_of_that_row_alone() -> None:
    vocab = 5000
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(3))
    expected = [Sampler(vocab).sample(logits[i : i + 1], [make_row(vocab)]).token_ids[0] for i in range(5)]
    logits[0, 4321] = math.nan
    logits[2] = -math.inf
    logits[3, 7] = math.inf
    rows = [make_row(vocab, logprobs=2) for _ in range(5)]
    result = Sampler(vocab).sample(logits, rows)
    assert result.token_ids == [-1, expected[1], -1, -1, expected[4]]
    assert result.errors[1] is result.errors[4] is None
    assert "nan" in str(result.errors[0])
    assert "no token is left" in str(result.errors[2])
    assert "inf" in str(result.errors[3])
    assert [entry is None for entry in result.logprobs] == [True, False, True, True, False]
    greedy = Sampler(vocab).sample(logits, [make_row(vocab, temperature=0) for _ in range(5)])
    assert [error is None for error in greedy.errors] == [False, True, False, False, True]


def test_nothing_left_to_choose_is_said() -> None:
    params = SamplingParams(allowed_token_ids=[EOS], min_tokens=4)
    result = Sampler(10).sample(torch.zeros(1, 10), [SampleRow(params, [1], 1, seed=0, eos_ids=[EOS])])
    assert "excluded by the request" in str(result.errors[0])


def test_logits_are_not_changed_and_their_shape_is_checked() -> None:
    logits = torch.randn(len(MIXED), 300, generator=torch.Generator().manual_seed(3))
    before = logits.clone()
    Sampler(300).sample(logits, [make_row(**params) for params in MIXED])
    assert torch.equal(logits, before)
    with pytest.raises(ValueError, match="300"):
        Sampler(300).sample(logits[:1], [make_row(), make_row()])


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0]])
    assert Sampler(4).sample(logits, [SampleRow(SamplingParams(temperature=0), [0], 1, seed=0)]).token_ids == [1]


def test_min_tokens_bars_every_end_until_it_is_reached() -> None:
    logits = torch.zeros(1, 10)
    logits[0, EOS], logits[0, 4] = 9.0, 5.0
    tokens = [1]
    row = SampleRow(SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[4]), tokens, 1, seed=0, eos_ids=[EOS])
    for _ in range(3):
        tokens += Sampler(10).sample(logits, [row]).token_ids
    assert tokens == [1, 0, 0, EOS]
    ignoring = SamplingParams(temperature=0, min_tokens=2, ignore_eos=True)
    assert Sampler(10).sample(logits, [SampleRow(ignoring, [1], 1, seed=0, eos_ids=[EOS])]).token_ids == [EOS]


def test_bad_words_of_several_tokens() -> None:
    params = SamplingParams(temperature=0)
    logits = torch.zeros(1, 10)
    logits[0, 7], logits[0, 5] = 9.0, 8.0

    def choose(tokens: list[int], *words: list[int]) -> int:
        return Sampler(10).sample(logits, [SampleRow(params, tokens, 2, seed=0, bad_words=words)]).token_ids[0]

    assert choose([1, 1, 6], [6, 7]) == 5
    assert choose([1, 1, 4], [6, 7]) == 7
    assert choose([1, 6], [6, 7]) == 7  # the prompt does not begin a bad word
    assert choose([1, 1, 6, 6], [6, 6, 7], [5]) == 0
    assert choose([1, 1], [7]) == 5


def test_bad_words_are_encoded_with_and_without_a_space() -> None:
    class Letters:
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            assert not add_special_tokens
            return [ord(letter) for letter in text]

    params = SamplingParams(bad_words=["ab", " c"])
    assert encode_bad_words(params, Letters()) == [[97, 98], [32, 97, 98], [32, 99]]


def test_penalties_see_the_whole_sequence_and_keep_up() -> None:
    """Counts that grow step by step equal counts made at once (and cost no walk over the whole text)."""
    from pagedkv.engine.adjust import TokenCounts

    tokens = [int(t) for t in torch.randint(0, 50, (300,), generator=torch.Generator().manual_seed(1))]
    for with_prompt in (True, False):
        live = tokens[:100]
        growing = TokenCounts(live, 100, with_prompt=with_prompt)
        for token in tokens[100:]:
            live.append(token)
            growing.update()
        ids, counts = growing.update()
        seen = {int(t): int(c) for t, c in zip(ids, counts, strict=True)}
        assert seen == {t: tokens[100:].count(t) for t in (tokens if with_prompt else tokens[100:])}


def test_a_grammar_limits_its_row_alone() -> None:
    class Even:
        def mask(self, row: np.ndarray[Any, Any]) -> None:
            row[:] = 0x55555555

        def fork(self) -> Even:
            return Even()

    logits = torch.zeros(2, 50)
    logits[:, 41], logits[:, 8] = 9.0, 5.0
    params = SamplingParams(temperature=0)
    rows = [SampleRow(params, [0], 1, seed=0, grammar=Even()), SampleRow(params, [0], 1, seed=0)]  # type: ignore[arg-type]
    assert Sampler(50).sample(logits, rows).token_ids == [8, 41]
    assert Sampler(50).sample(logits[:1], [rows[0].fork([0], 1)]).token_ids == [8]
