"""Every refusal names the field, the value and the limit; odd but legal values are normalised once."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from pagedkv.engine.params import BeamSearchParams, SamplingParams, check, check_ids
from pagedkv.errors import InvalidRequest

VOCAB = 1000
NAN = math.nan
NOT_IDS = [-1, 2**31, 2**63, 1.5, "x", True, None, [3]]


def test_defaults_are_the_fields() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (1, 1.0, 1.0, 0, 16)
    assert params.stop_strings == params.stop_token_ids == ()
    assert not params.greedy


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, -1, 129, 10**6, 1.0, "2", True, None]),
        ("temperature", [-1, -1e-9, math.inf, NAN, "1", None, True, 1e7, 10**400]),
        ("top_p", [-0.1, 1.1, NAN, math.inf, "1", None]),
        ("top_k", [-2, 2**31, 1.5, "5", None, True]),
        ("min_p", [-0.1, 1.1, NAN]),
        ("seed", [-(2**63) - 1, 2**64, 1.5, "7", False]),
        ("max_tokens", [0, -1, 10**12, "5", 1.0, True]),
        ("min_tokens", [-1, 17, None, 10**12]),
        ("logprobs", [-1, 21, 10**6, "5", True]),
        ("prompt_logprobs", [-1, 21, 10**6]),
        ("presence_penalty", [-2.1, 2.1, NAN]),
        ("frequency_penalty", [-2.1, 2.1, NAN]),
        ("repetition_penalty", [0, -1, 101, NAN, 1e-300]),
        ("stop", ["", [""], [1], 5, ["x"] * 65, "x" * 1025, {"a": 1}]),
        ("bad_words", ["", [""], [None], 5, ["x"] * 257]),
        ("stop_token_ids", [*([v] for v in NOT_IDS), "12", 5, list(range(1025))]),
        ("allowed_token_ids", [*([v] for v in NOT_IDS), [], "12", 5]),
        (
            "logit_bias",
            [{1: 1e9}, {1: NAN}, {1: "a"}, {1: None}, {-1: 0}, {"-1": 0}, {"1.5": 0}, {"": 0}, {True: 0}, [1]],
        ),
        ("ignore_eos", [1, "true", None]),
        ("structured_outputs", [{"regex": "a"}, "a"]),
        ("skip_special_tokens", [0, None]),
        ("include_stop_str_in_output", ["no"]),
    ],
)
def test_b64_b65_b74_b76_a_bad_value_is_refused_by_name(field: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest, match=field) as caught:
            SamplingParams(**{field: value})
        assert caught.value.field == field, value
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [("n", 129, "[1, 128]"), ("temperature", -1, "[0, "), ("logprobs", 21, "[0, 20]"), ("stop", ["x"] * 65, "64")],
)
def test_the_message_has_value_and_limit(field: str, value: object, limit: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert limit in str(caught.value)
    assert str(len(value) if isinstance(value, list) else value) in str(caught.value)


def test_b74_odd_but_legal_values() -> None:
    for temperature in (0, 1e-12, 9e-6):
        assert SamplingParams(temperature=temperature).greedy
    for temperature in (1e-5, 1e-4, 2, 100):
        assert not SamplingParams(temperature=temperature).greedy
    for top_p in (0, 1e-9, 1):
        assert SamplingParams(top_p=top_p).top_p == top_p
    assert SamplingParams(top_k=-1).top_k == -1
    assert SamplingParams(top_k=10**9).top_k == 10**9
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=2**64 - 1).seed == 2**64 - 1
    assert SamplingParams(n=np.int64(3)).n == 3
    assert SamplingParams(temperature=np.float32(0.5)).temperature == 0.5


def test_forms_are_normalised() -> None:
    assert SamplingParams(stop="a").stop_strings == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams(logit_bias={"5": 1, 6: -100}).logit_bias == {5: 1.0, 6: -100.0}
    params = SamplingParams(stop=["a"], logit_bias={1: 2}, allowed_token_ids=[4, 5], bad_words=["x"])
    assert isinstance(hash(params), int)
    assert params == dataclasses.replace(params)


def test_b65_max_tokens_zero_is_for_scoring_only() -> None:
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    assert SamplingParams(max_tokens=None).max_tokens is None
    with pytest.raises(InvalidRequest, match=r"\[1, "):
        SamplingParams(max_tokens=0)


def test_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_b64_ids_are_bound_by_the_models_vocabulary(field: str) -> None:
    def make(token_id: int) -> SamplingParams:
        return SamplingParams(**{field: {token_id: 1.0} if field == "logit_bias" else [token_id]})

    check(make(VOCAB - 1), vocab_size=VOCAB)
    with pytest.raises(InvalidRequest, match=rf"{field} holds 1000; ids must be in \[0, 999\]") as caught:
        check(make(VOCAB), vocab_size=VOCAB)
    assert caught.value.field == field


def test_b63_an_allowed_set_above_the_tokenizer_is_refused() -> None:
    check(SamplingParams(allowed_token_ids=[899, 950]), vocab_size=VOCAB, num_decodable=900)
    with pytest.raises(InvalidRequest, match="below 900"):
        check(SamplingParams(allowed_token_ids=[900, 950]), vocab_size=VOCAB, num_decodable=900)


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_text_needs_a_tokenizer(field: str) -> None:
    params = SamplingParams(**{field: ["x"]})
    check(params, vocab_size=VOCAB, num_decodable=VOCAB)
    with pytest.raises(InvalidRequest, match="no tokenizer") as caught:
        check(params, vocab_size=VOCAB)
    assert caught.value.field == field


def test_b64_prompt_ids() -> None:
    check_ids([0, 999], VOCAB, field="prompt")
    for bad in (-1, VOCAB, 2**31, 2**63):
        with pytest.raises(InvalidRequest, match="prompt"):
            check_ids([5, bad], VOCAB, field="prompt")


@pytest.mark.parametrize(
    ("field", "value"),
    [("beam_width", 0), ("beam_width", 65), ("max_tokens", 0), ("length_penalty", NAN), ("temperature", -1)],
)
def test_beam_params_are_checked(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=field):
        BeamSearchParams(**{"beam_width": 4, "max_tokens": 8, field: value})
