"""Sampling as a user meets it: the same request gives the same answer alone, in a crowd, cached and preempted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedkv import LLM, SamplingParams
from pagedkv.engine.outputs import CompletionOutput, RequestOutput

PROMPT = [30, 31, 99, 250, 17, 44, 45, 200, 201, 10, 60]
REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    (PROMPT, {"temperature": 0}),
    (PROMPT, {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 0.5}),
    (PROMPT[:7], {"seed": 1}),
    (PROMPT[:7], {"seed": 1, "n": 3, "top_p": 0.9}),
    (PROMPT[2:], {"seed": 2, "top_k": 20, "logprobs": 3}),
    (PROMPT[4:], {"seed": 2, "min_p": 0.05, "presence_penalty": -1.0, "n": 2}),
    (PROMPT[:9], {"seed": 3, "temperature": 2.0, "prompt_logprobs": 1, "logprobs": 0}),
    (PROMPT[:4], {"seed": 4, "allowed_token_ids": list(range(70, 90)), "logit_bias": {75: 3.0}}),
    (PROMPT[:3], {"seed": 5, "min_tokens": 14}),
]


@pytest.fixture(scope="module")
def directory(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    return LLM(str(directory), block_size=4, num_gpu_blocks_override=400, max_model_len=128)


def params_of(values: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 16, **values})


def answers(output: RequestOutput) -> list[tuple[Any, ...]]:
    assert output.error is None
    return [
        (list(o.token_ids), o.text, o.finish_reason, o.stop_reason, o.logprobs, o.cumulative_logprob)
        for o in output.outputs
    ]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[RequestOutput]:
    return [llm.generate([prompt], params_of(values), use_tqdm=False)[0] for prompt, values in REQUESTS]


def test_a_seeded_request_does_not_depend_on_its_company(llm: LLM, alone: list[RequestOutput]) -> None:
    for order in (range(len(REQUESTS)), range(len(REQUESTS) - 1, -1, -1)):
        prompts = [REQUESTS[i][0] for i in order]
        together = llm.generate(prompts, [params_of(REQUESTS[i][1]) for i in order], use_tqdm=False)
        for i, output in zip(order, together, strict=True):
            assert answers(output) == answers(alone[i]), REQUESTS[i]
            assert output.prompt_logprobs == alone[i].prompt_logprobs


@pytest.mark.parametrize("num_blocks", [9, 14, 24])
def test_b35_preemption_changes_no_token(directory: Path, alone: list[RequestOutput], num_blocks: int) -> None:
    small = LLM(str(directory), block_size=4, num_gpu_blocks_override=num_blocks, max_model_len=28)
    outputs = small.generate(
        [prompt for prompt, _ in REQUESTS], [params_of(values) for _, values in REQUESTS], use_tqdm=False
    )
    assert small.stats().num_preemptions > 0
    for output, expected in zip(outputs, alone, strict=True):
        assert answers(output) == answers(expected)
        assert output.prompt_logprobs == expected.prompt_logprobs


def test_penalties_see_a_prompt_that_was_cached(llm: LLM) -> None:
    params = params_of({"temperature": 0, "repetition_penalty": 2.0})
    llm.reset_prefix_cache()
    cold = llm.generate([PROMPT], params, use_tqdm=False)[0]
    warm = llm.generate([PROMPT], params, use_tqdm=False)[0]
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == len(PROMPT) - 1
    assert answers(cold) == answers(warm)
    assert not set(cold.outputs[0].token_ids) & set(PROMPT)


def test_unseeded_requests_differ_and_an_engine_repeats_itself(directory: Path) -> None:
    def run(seed: int) -> list[list[int]]:
        llm = LLM(str(directory), block_size=4, num_gpu_blocks_override=100, max_model_len=64, seed=seed)
        return [list(o.outputs[0].token_ids) for o in llm.generate([PROMPT] * 3, SamplingParams(), use_tqdm=False)]

    first = run(0)
    assert len({tuple(ids) for ids in first}) == 3
    assert run(0) == first
    assert run(1) != first


def test_the_streamed_text_only_grows_and_stops_in_the_right_place(llm: LLM) -> None:
    free = llm.generate([PROMPT], params_of({"seed": 8, "max_tokens": 40}), use_tqdm=False)[0].outputs[0]
    valid = free.text
    for start in range(2, len(valid) - 3, 8):
        stop = valid[start : start + 3]
        for include in (False, True):
            said, last = "", free
            params = params_of(
                {"seed": 8, "max_tokens": 40, "stop": [stop, "never"], "include_stop_str_in_output": include}
            )
            for output in llm.stream([PROMPT], params):
                last = output.outputs[0]
                assert last.text.startswith(said)
                said = last.text
            end = valid.index(stop)
            assert said == valid[: end + (3 if include else 0)]
            assert (last.finish_reason, last.stop_reason) == ("stop", stop)
            assert list(last.token_ids) == list(free.token_ids[: len(last.token_ids)])


def test_b85_every_eos_id_and_what_turns_it_off(tiny_model: Callable[..., Path], llm: LLM) -> None:
    base = llm.generate([PROMPT], params_of({"temperature": 0}), use_tqdm=False)[0].outputs[0].token_ids
    eos = [base[6], base[9]]
    ending = LLM(str(tiny_model("llama", eos_token_id=eos)), block_size=4, num_gpu_blocks_override=100)

    def run(**values: Any) -> CompletionOutput:
        return ending.generate([PROMPT], params_of({"temperature": 0, **values}), use_tqdm=False)[0].outputs[0]

    first = min(base.index(token) for token in eos)
    stopped = run()
    assert (list(stopped.token_ids), stopped.finish_reason) == (list(base[: first + 1]), "stop")
    assert stopped.stop_reason is None
    assert stopped.text == ending.tokenizer.decode(base[:first]).removesuffix("\ufffd")
    assert list(run(ignore_eos=True).token_ids) == list(base)
    longer = run(min_tokens=first + 1)
    assert len(longer.token_ids) > first + 1
    assert not {*eos, 2} & set(longer.token_ids[: first + 1])
    asked = run(ignore_eos=True, stop_token_ids=[base[3]])
    assert asked.stop_reason == base[3]
    assert list(asked.token_ids) == list(base[: base.index(base[3]) + 1])


def test_bad_words_and_allowed_ids(llm: LLM) -> None:
    free = llm.generate([PROMPT], params_of({"temperature": 0}), use_tqdm=False)[0].outputs[0]
    letter = next(c for c in free.text if c.isascii() and c.isalpha())
    (token,) = llm.tokenizer.encode(letter, add_special_tokens=False)
    without = llm.generate([PROMPT], params_of({"temperature": 0, "bad_words": [letter]}), use_tqdm=False)[0].outputs[0]
    assert token in free.token_ids
    assert token not in without.token_ids
    allowed = llm.generate([PROMPT], params_of({"allowed_token_ids": [5, 6]}), use_tqdm=False)[0].outputs[0]
    assert set(allowed.token_ids) == {5, 6}
