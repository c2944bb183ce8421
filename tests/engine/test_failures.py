"""Aborts in every state, and failures that stay with the request that has them."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine, lone, make_engine, text_hash, tokens_of

from pagedkv.engine.params import BeamSearchParams, SamplingParams
from pagedkv.errors import InvalidRequest

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPT = list(range(1, 30))


def until(engine: FakeEngine, state: str) -> None:
    """Steps until the request named "x" is in this state."""
    if state == "queued":
        return
    for _ in range(100):
        engine.checked_step()
        seq = next((seq for seq in engine.scheduler.running if seq.request.request_id == "x"), None)
        if state == "mid prefill" and seq is not None and seq.in_prefill:
            return
        if state == "decoding" and seq is not None and seq.num_output_tokens > 2:
            return
        if state == "finished" and not engine.has_unfinished():
            return
    raise AssertionError(f"never {state}")


@pytest.mark.parametrize("state", ["queued", "mid prefill", "decoding", "preempted", "finished", "unknown", "twice"])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(n=3, max_tokens=12, seed=1), BeamSearchParams(3, 12)])
def test_b07_abort_in_every_state_is_harmless(state: str, params: SamplingParams | BeamSearchParams) -> None:
    engine = make_engine(24 if state == "preempted" else 64, max_num_batched_tokens=16)
    other = None
    if state == "preempted":
        other = SamplingParams(temperature=0, max_tokens=60)
        engine.add_request("other", PROMPT[3:10], other)
        engine.checked_step()
    if state != "unknown":
        engine.add_request("x", PROMPT, params)
        until(engine, "decoding" if state in ("twice", "preempted") else state)
    if state == "preempted":
        for seq in [seq for seq in engine.scheduler.running if seq.request.request_id == "x"]:
            engine.scheduler._preempt(seq, engine.plans[-1])
            engine.runner.release([seq])
    outputs = engine.abort("x")
    expected = 0 if state in ("finished", "unknown") else 1
    assert len(outputs) == expected
    if outputs:
        assert outputs[0].finished
        assert outputs[0].error is None
        assert all(sample.finish_reason == "abort" for sample in outputs[0].outputs)
    held = [key for key in engine.scheduler.manager.tables if key[0] == (1 if other else 0)]
    assert held == [], "blocks are back at once"
    engine.check()
    assert engine.abort("x") == []
    engine.add_request("after", PROMPT, GREEDY)
    outputs = engine.run()
    assert tokens_of(outputs["after"]) == tokens_of(lone(PROMPT, GREEDY))
    if other is not None:
        assert tokens_of(outputs["other"]) == tokens_of(lone(PROMPT[3:10], other))
    engine.assert_balanced()


def test_b22_an_abort_in_the_middle_of_a_prefill_publishes_only_what_was_computed() -> None:
    for steps, computed in ((0, 0), (1, 4), (2, 8), (3, 14)):
        engine = make_engine(64, max_num_batched_tokens=6 if computed == 14 else 4, max_num_seqs=4)
        engine.add_request("x", list(range(1, 41)), GREEDY)
        for _ in range(steps):
            engine.checked_step()
        engine.abort("x")
        engine.add_request("again", list(range(1, 41)), GREEDY)
        output = engine.run()["again"]
        assert output.num_cached_tokens <= (6 * steps if computed == 14 else computed) // 4 * 4
        assert tokens_of(output) == tokens_of(lone(list(range(1, 41)), GREEDY))


def test_bad_logits_end_their_own_request_only() -> None:
    engine = make_engine()
    bad = [9, 8, 7, 6, 5]
    first = tokens_of(lone(bad, SamplingParams(temperature=0, max_tokens=2)))[0]
    engine.model.poison.add(text_hash([*bad, *first[:1]]))  # its second token cannot be chosen
    for name, ids in (("good", PROMPT), ("bad", bad), ("good too", PROMPT[5:])):
        engine.add_request(name, ids, GREEDY)
    outputs = engine.run()
    assert "logits" in (outputs["bad"].error or "")
    assert outputs["bad"].outputs[0].finish_reason == "abort"
    assert list(outputs["bad"].outputs[0].token_ids) == first[:1]
    assert engine.stats().num_failed == 1
    for name, ids in (("good", PROMPT), ("good too", PROMPT[5:])):
        assert outputs[name].error is None
        assert tokens_of(outputs[name]) == tokens_of(lone(ids, GREEDY))
    engine.assert_balanced()


@pytest.mark.parametrize("params", [BeamSearchParams(3, 6), SamplingParams(n=3, max_tokens=6, seed=2)])
def test_bad_logits_of_one_beam_or_sample_end_the_request_as_a_whole(params: SamplingParams | BeamSearchParams) -> None:
    engine = make_engine()
    found = tokens_of(lone(PROMPT, params))[0]
    engine.model.poison.add(text_hash([*PROMPT, *found[:2]]))
    engine.add_request("bad", PROMPT, params)
    engine.add_request("good", PROMPT[3:], GREEDY)
    outputs = engine.run()
    assert outputs["bad"].error
    assert tokens_of(outputs["good"]) == tokens_of(lone(PROMPT[3:], GREEDY))
    engine.assert_balanced()


def test_a_sampler_that_raises_for_one_row_ends_that_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    sampler = engine.sampling._sampler
    honest = sampler.sample

    def sample(logits: object, rows: list[object]) -> object:
        if any(row.params.seed == 13 for row in rows):  # type: ignore[attr-defined]
            raise ZeroDivisionError("thirteen")
        return honest(logits, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(sampler, "sample", sample)
    engine.add_request("good", PROMPT, GREEDY)
    engine.add_request("bad", PROMPT[2:], SamplingParams(seed=13, max_tokens=4))
    outputs = engine.run()
    assert "thirteen" in (outputs["bad"].error or "")
    assert tokens_of(outputs["good"]) == tokens_of(lone(PROMPT, GREEDY))
    engine.assert_balanced()


def test_text_that_cannot_be_made_ends_its_own_request_only() -> None:
    engine = make_engine()
    engine.add_request("bad", PROMPT, GREEDY)
    engine.add_request("good", PROMPT, GREEDY)

    class Broken:
        text = ""

        def push(self, _: int) -> None:
            raise UnicodeError("no")

    engine._requests[0].sequences[0].voice = Broken()  # type: ignore[assignment]
    outputs = engine.run()
    assert "UnicodeError" in (outputs["bad"].error or "")
    assert tokens_of(outputs["good"]) == tokens_of(lone(PROMPT, GREEDY))
    engine.assert_balanced()


def test_a_forward_pass_that_raises_ends_what_was_in_it_and_the_engine_can_go_on() -> None:
    engine = make_engine()
    engine.add_request("x", PROMPT, GREEDY)
    engine.checked_step()
    engine.model.fail_at = 0
    with pytest.raises(RuntimeError, match="told to fail"):
        engine.step()
    engine.model.fail_at = None
    outputs = engine.run()
    assert "told to fail" in (outputs["x"].error or "")
    engine.add_request("y", PROMPT, GREEDY)
    assert tokens_of(engine.run()["y"]) == tokens_of(lone(PROMPT, GREEDY))
    engine.assert_balanced()


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([], "prompt"),
        ([64], "prompt"),
        ([-1], "prompt"),
        ([2**63], "prompt"),
        ([1.5], "prompt"),
        ([True], "prompt"),
        ([[1]], "prompt"),
        ({"prompt_token_ids": []}, "prompt"),
        ({"text": "x"}, "prompt"),
        ({}, "prompt"),
        ("text", "prompt"),
        (None, "prompt"),
        (b"bytes", "prompt"),
    ],
)
def test_b64_b65_what_is_no_prompt_is_refused_by_name_and_disturbs_nobody(prompt: object, field: str) -> None:
    engine = make_engine()
    engine.add_request("running", PROMPT, GREEDY)
    engine.checked_step()
    with pytest.raises(InvalidRequest) as caught:
        engine.add_request("x", prompt, GREEDY)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert tokens_of(engine.run()["running"]) == tokens_of(lone(PROMPT, GREEDY))
    engine.assert_balanced()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"priority": 1.5}, "priority"),
        ({"priority": 2**40}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 3}, "cache_salt"),
        ({"adapter": b"x"}, "adapter"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_engine().add_request("x", PROMPT, GREEDY, **options)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_b75_ten_requests_of_the_same_name_are_ten_requests() -> None:
    engine = make_engine()
    keys = [engine.add_request("same", [*PROMPT[:10], i], GREEDY) for i in range(10)]
    done: dict[int, list[list[int]]] = {}
    while engine.has_unfinished():
        for key, output in engine.step_keyed():
            assert output.request_id == "same"
            if output.finished:
                done[key] = tokens_of(output)
    for i, key in enumerate(keys):
        assert done[key] == tokens_of(lone([*PROMPT[:10], i], GREEDY))
    for i in range(3):
        engine.add_request("same", [*PROMPT[:10], i], GREEDY)
    assert len(engine.abort("same")) == 3
    with pytest.raises(InvalidRequest, match="request_id"):
        engine.add_request("x" * 2**20, PROMPT, GREEDY)
    engine.assert_balanced()
