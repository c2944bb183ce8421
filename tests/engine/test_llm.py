"""LLM: lists in, lists out, in order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pagedkv import LLM, SamplingParams
from pagedkv.cache.policies import SegmentedLRU
from pagedkv.errors import InvalidRequest, RequestTooLong

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[..., Path]) -> LLM:
    return LLM(str(tiny_model()), num_gpu_blocks_override=128, max_model_len=256, max_num_seqs=4)


def answers(llm: LLM, prompts: list[object]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]  # type: ignore[arg-type]


def test_b41_results_belong_to_their_prompts_in_every_call(llm: LLM) -> None:
    prompts: list[object] = [[10 + i, 20 + i, 30] for i in range(7)]
    alone = {str(prompt): answers(llm, [prompt])[0] for prompt in prompts}
    for order in (prompts, prompts[::-1], [*prompts[2:5], prompts[2], prompts[2]], prompts[:1]):
        assert answers(llm, order) == [alone[str(prompt)] for prompt in order]
    assert answers(llm, []) == []
    assert prompts == [[10 + i, 20 + i, 30] for i in range(7)], "the caller's lists are not touched"


def test_b41_one_bad_item_refuses_the_call_and_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt 1 of 3.*999999"):
        llm.generate([[1], [999999], [2]], GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished()
    assert len(answers(llm, [[5]])) == 1


def test_every_form_of_a_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode("the cache")
    forms: list[object] = ["the cache", ids, {"prompt": "the cache"}, {"prompt_token_ids": ids}]
    assert len({tuple(answer) for answer in answers(llm, forms)}) == 1
    for form in forms:
        output = llm.generate(form, GREEDY, use_tqdm=False)[0]  # type: ignore[arg-type]
        assert output.prompt_token_ids == ids
        assert output.prompt == ("the cache" if form in forms[::2] else None)


def test_parameters_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=i + 1, ignore_eos=True) for i in range(3)]
    outputs = llm.generate([[1], [2], [3]], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]
    with pytest.raises(InvalidRequest, match="2 given for 3"):
        llm.generate([[1], [2], [3]], params[:2], use_tqdm=False)


def test_b44_too_long_is_an_error_with_both_numbers_and_the_limit_a_reason_to_end(llm: LLM) -> None:
    with pytest.raises(RequestTooLong, match=r"256 tokens.*256"):
        llm.generate([5] * 256, GREEDY, use_tqdm=False)
    output = llm.generate([5] * 250, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True), use_tqdm=False)[0]
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (6, "length")


@pytest.mark.parametrize("prompt", ["", [], [[]], {"prompt_token_ids": []}])
def test_b65_an_empty_prompt_says_what_is_missing_and_the_engine_goes_on(llm: LLM, prompt: object) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        llm.generate(prompt if prompt != [] else [[]], GREEDY, use_tqdm=False)  # type: ignore[arg-type]
    assert len(answers(llm, [[7]])[0]) == 6


def test_a_stream_that_is_closed_ends_its_requests(llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    stream = llm.stream([[1, 2, 3], [4, 5]], long)
    seen = [next(stream) for _ in range(5)]
    assert {output.request_id for output in seen} == {"0", "1"}
    stream.close()
    assert not llm.engine.has_unfinished()
    assert llm.stats().blocks_in_use == 0


def test_metrics_and_stats_say_what_happened(llm: LLM) -> None:
    llm.reset_prefix_cache()
    before = llm.stats()
    prompt = list(range(3, 51))
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    stats = llm.stats()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 47)
    assert stats.prefix_queries - before.prefix_queries == 96
    assert stats.prefix_hits - before.prefix_hits == 47
    assert stats.prefill_tokens - before.prefill_tokens == 49
    assert stats.generated_tokens - before.generated_tokens == 12
    assert stats.blocks_free + stats.blocks_cached == stats.num_blocks == 128
    for output in (first, second):
        metrics = output.metrics
        assert metrics.arrival <= (metrics.first_scheduled or 0) <= (metrics.first_token or 0)
        assert (metrics.first_token or 0) <= (metrics.last_token or 0) <= (metrics.finished or 0)
        assert metrics.num_preemptions == 0


def test_the_banner_says_what_runs(llm: LLM) -> None:
    text = "\n".join(llm.banner)
    for part in ("128 blocks of 16 tokens", "max_model_len 256", "prefix caching on (lru)", "exact"):
        assert part in text
    assert llm.stats().exact == llm.engine.exact


def test_the_eviction_policy_is_the_one_asked_for(tiny_model: Callable[..., Path]) -> None:
    llm = LLM(str(tiny_model()), num_gpu_blocks_override=16, max_model_len=64, eviction_policy="slru")
    assert isinstance(llm.engine.scheduler.prefix.policy, SegmentedLRU)  # type: ignore[union-attr]
    with pytest.raises(InvalidRequest, match="eviction_policy must be one of lru, slru"):
        LLM(str(tiny_model()), eviction_policy="random")


def test_unknown_keywords_and_foreign_code(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(TypeError, match="max_sequences"):
        LLM(str(tiny_model()), max_sequences=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest, match="no code"):
        LLM(str(tiny_model()), trust_remote_code=True)
