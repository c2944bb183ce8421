"""Beam search through the engine: forks and frees on the paged cache change no beam and leave no block behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lone_beams import search
from lone_run import run
from torch import Tensor

from pagedkv import LLM, BeamSearchParams, SamplingParams
from pagedkv.engine.outputs import RequestOutput

BLOCK = 4
PROMPT = [30, 31, 99, 250, 17, 44, 45, 200, 201, 10, 60]


@pytest.fixture(scope="module")
def directory(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    return LLM(str(directory), block_size=BLOCK, num_gpu_blocks_override=400, max_model_len=128)


def alone(llm: LLM, prompt: Sequence[int]) -> Callable[[Sequence[int]], Tensor]:
    """The model by itself: every history from scratch."""
    model = llm._built.loaded.model

    def logits(tokens: Sequence[int]) -> Tensor:
        ids = [*prompt, *tokens]
        return run(model, ids, [len(ids)])[-1]

    return logits


def assert_nothing_is_held(llm: LLM) -> None:
    assert llm.stats().blocks_in_use == 0
    assert llm.reset_prefix_cache() == (True, 0)
    manager = llm.engine.scheduler.manager
    assert manager.allocator.num_free == manager.allocator.num_blocks
    assert not manager.tables
    manager.check()


def assert_same(output: RequestOutput, expected: Sequence[Any], tolerance: float = 1e-5) -> None:
    assert [list(one.token_ids) for one in output.outputs] == [one.tokens for one in expected]
    assert [one.score for one in output.outputs] == pytest.approx([one.score for one in expected], abs=tolerance)
    assert [one.finish_reason for one in output.outputs] == [one.finish_reason for one in expected]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_b30_forks_at_every_offset_of_a_block(llm: LLM, width: int) -> None:
    """Prompts that end one before, at and one after a block's border; the beams cross two borders more."""
    prompts = [PROMPT[:length] for length in (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK)]
    params = BeamSearchParams(width, 2 * BLOCK + 1, ignore_eos=True)
    for prompt, output in zip(prompts, llm.beam_search(prompts, params, use_tqdm=False), strict=True):
        assert output.finished
        assert output.error is None
        assert_same(output, search(alone(llm, prompt), params))
    assert_nothing_is_held(llm)


def test_b30_width_one_is_greedy(llm: LLM) -> None:
    beam = llm.beam_search([PROMPT], BeamSearchParams(1, 10), use_tqdm=False)[0].outputs[0]
    greedy = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)[0].outputs[0]
    assert beam.token_ids == greedy.token_ids
    assert beam.text == greedy.text
    assert beam.finish_reason == greedy.finish_reason


@pytest.mark.parametrize("penalty", [1.0, 0.0])
def test_equals_transformers(directory: Path, llm: LLM, penalty: float) -> None:
    transformers: Any = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    params = BeamSearchParams(4, 14, length_penalty=penalty)
    prompts = [PROMPT[:6], PROMPT]
    for prompt, output in zip(prompts, llm.beam_search(prompts, params, use_tqdm=False), strict=True):
        theirs = model.generate(
            torch.tensor([prompt]),
            num_beams=4,
            num_return_sequences=4,
            early_stopping=False,
            length_penalty=penalty,
            max_new_tokens=14,
            do_sample=False,
            eos_token_id=llm.engine.intake.eos_ids,
            pad_token_id=1,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert [one.score for one in output.outputs] == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-4)
        for one, row in zip(output.outputs, theirs.sequences[:, len(prompt) :].tolist(), strict=True):
            assert list(one.token_ids) == row[: len(one.token_ids)]


def test_b30_beams_that_end_are_dropped_and_the_text_has_no_eos(tiny_model: Callable[..., Path], llm: LLM) -> None:
    params = BeamSearchParams(4, 12, length_penalty=0.0)
    likely = search(alone(llm, PROMPT), params)[0].tokens
    eos = [likely[2], likely[5]]
    ending = LLM(str(tiny_model("llama", eos_token_id=eos)), block_size=BLOCK, num_gpu_blocks_override=400)
    assert set(eos) <= set(ending.engine.intake.eos_ids)
    output = ending.beam_search([PROMPT], params, use_tqdm=False)[0]
    assert_same(output, search(alone(ending, PROMPT), params, ending.engine.intake.eos_ids))
    assert any(one.finish_reason == "stop" for one in output.outputs)
    for one in output.outputs:
        body = one.token_ids[:-1] if one.finish_reason == "stop" else one.token_ids
        assert one.text == ending.tokenizer.decode(body)
    assert_nothing_is_held(ending)


def test_b35_a_pool_that_holds_few_beams_changes_none(directory: Path, llm: LLM) -> None:
    """Beams are preempted and come back while the others wait for them."""
    small = LLM(str(directory), block_size=BLOCK, num_gpu_blocks_override=16, max_model_len=48)
    params = BeamSearchParams(4, 14, ignore_eos=True)
    prompts = [PROMPT[:6], PROMPT]
    expected = llm.beam_search(prompts, params, use_tqdm=False)
    found = small.beam_search(prompts, params, use_tqdm=False)
    for one, other in zip(found, expected, strict=True):
        assert [o.token_ids for o in one.outputs] == [o.token_ids for o in other.outputs]
        assert [o.score for o in one.outputs] == [o.score for o in other.outputs]
    assert small.stats().num_preemptions > 0
    assert_nothing_is_held(small)


def test_beams_beside_other_requests_change_nothing(llm: LLM) -> None:
    prompts = [PROMPT, PROMPT[:5], PROMPT[:7]]
    params = [BeamSearchParams(3, 9), SamplingParams(temperature=0, max_tokens=9), SamplingParams(seed=3, n=2)]
    outputs: dict[str, RequestOutput] = {}
    for output in llm.stream(prompts, params):
        outputs[output.request_id] = output
    assert_same(outputs["0"], search(alone(llm, PROMPT), params[0], llm.engine.intake.eos_ids))  # type: ignore[arg-type]
    for index in (1, 2):
        single = llm.generate([prompts[index]], params[index], use_tqdm=False)[0]  # type: ignore[arg-type]
        assert [o.token_ids for o in outputs[str(index)].outputs] == [o.token_ids for o in single.outputs]
    assert_nothing_is_held(llm)


def test_an_abort_in_the_middle_gives_every_block_back(llm: LLM) -> None:
    for steps in range(7):
        llm.engine.add_request("beam", PROMPT, BeamSearchParams(4, 20, ignore_eos=True))
        for _ in range(steps):
            llm.engine.step()
        outputs = llm.engine.abort("beam")
        assert [output.finished for output in outputs] == [True]
        assert llm.engine.abort("beam") == []
        assert_nothing_is_held(llm)
    assert not llm.engine.has_unfinished()


def test_a_search_ends_at_the_context(directory: Path) -> None:
    short = LLM(str(directory), block_size=BLOCK, num_gpu_blocks_override=100, max_model_len=len(PROMPT) + 3)
    output = short.beam_search([PROMPT], BeamSearchParams(4, 50, ignore_eos=True), use_tqdm=False)[0]
    assert [(len(one.token_ids), one.finish_reason) for one in output.outputs] == [(3, "length")] * 4


def test_b30_more_beams_than_seats(directory: Path, llm: LLM) -> None:
    """Beams take turns on two seats; what has its candidates makes room for what has not."""
    seats = LLM(str(directory), block_size=BLOCK, num_gpu_blocks_override=12, max_model_len=40, max_num_seqs=2)
    params = BeamSearchParams(8, 6, ignore_eos=True)
    expected = llm.beam_search([PROMPT[:5]], params, use_tqdm=False)[0]
    found = seats.beam_search([PROMPT[:5]], params, use_tqdm=False)[0]
    assert [o.token_ids for o in found.outputs] == [o.token_ids for o in expected.outputs]
    assert [o.score for o in found.outputs] == [o.score for o in expected.outputs]
    assert_nothing_is_held(seats)
