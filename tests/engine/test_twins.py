"""Twins: nobody computes what another is computing right now, and nobody waits in vain."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine, lone, make_engine, text_hash, tokens_of

from pagedkv.engine.params import SamplingParams
from pagedkv.engine.twins import Twins

SHARED = list(range(1, 33))  # 8 blocks of 4
GREEDY = SamplingParams(temperature=0, max_tokens=3)


def add(engine: FakeEngine, name: str, prompt: list[int], **options: object) -> int:
    return engine.add_request(name, prompt, GREEDY, **options)  # type: ignore[arg-type]


def scheduled(engine: FakeEngine) -> list[list[tuple[int, int, int]]]:
    """(request, start, tokens) of every chunk, step by step."""
    return [[(key[0], chunk.start, chunk.num_tokens) for key, chunk in plan.chunks.items()] for plan in engine.plans]


def test_a_prefix_that_arrives_32_times_is_computed_once() -> None:
    engine = make_engine(256, max_num_seqs=32, max_num_batched_tokens=512)
    for i in range(32):
        add(engine, str(i), [*SHARED, 40 + i % 20, i % 7])
    outputs = engine.run()
    assert engine.stats().prefill_tokens == 32 + 32 * 2
    assert engine.stats().num_twin_waits == 31
    for i in (0, 13, 31):
        assert tokens_of(outputs[str(i)]) == tokens_of(lone([*SHARED, 40 + i % 20, i % 7], GREEDY))
    engine.assert_balanced()


def test_a_waiter_holds_no_blocks_and_follows_chunk_by_chunk() -> None:
    engine = make_engine(64, max_num_batched_tokens=8)
    add(engine, "leader", [*SHARED, 50])
    add(engine, "twin", [*SHARED[:16], 51, 52])
    for expected in (8, 16):
        engine.checked_step()
        assert engine.scheduler.running[0].num_computed_tokens == expected
        assert len(engine.scheduler.running) == 1
        assert len(engine.scheduler.waiting) == 1
        assert set(engine.scheduler.manager.tables) == {(0, 0)}
    engine.checked_step()  # the twin's part of the prefix is published, half of the leader's prompt is not computed yet
    assert [key for key, _, _ in scheduled(engine)[-1]] == [0, 1]
    assert engine.scheduler.running[1].request.num_cached_tokens == 16
    engine.run()
    engine.assert_balanced()


def test_it_does_not_wait_for_a_small_saving_behind_a_long_prefill() -> None:
    """All chats share the first block of the template: that is no reason to queue behind one long prompt."""
    engine = make_engine(128, max_num_batched_tokens=8)
    add(engine, "long", [1, 2, 3, 4, *range(10, 60)])
    engine.checked_step()
    engine.scheduler.prefix.clear()  # type: ignore[union-attr]  # nothing of it can be hit; it goes on computing
    engine.scheduler.admission.twins.clear()
    engine.scheduler.admission.twins.lead(("long", 0), engine.scheduler.running[0].chain.keys.copy(), 0)  # type: ignore[union-attr]
    add(engine, "chat", [1, 2, 3, 4, *range(30, 60)])
    engine.checked_step()
    assert [seq.request.request_id for seq in engine.scheduler.running] == ["long", "chat"]


def test_it_waits_for_a_small_saving_of_one_step() -> None:
    engine = make_engine(128, max_num_batched_tokens=64)
    add(engine, "first", [1, 2, 3, 4, *range(10, 20)])
    add(engine, "second", [1, 2, 3, 4, *range(20, 60)])
    engine.run()
    assert scheduled(engine)[0] == [(0, 0, 14)]
    assert scheduled(engine)[1] == [(0, 14, 1), (1, 4, 40)]


@pytest.mark.parametrize("ending", ["abort", "preemption", "error"])
def test_when_the_leader_ends_the_oldest_waiter_leads_in_the_same_step(ending: str) -> None:
    """The leader ends before anything of the wait is published; the step after has the oldest waiter in it."""
    engine = make_engine(16, max_num_seqs=4, max_num_batched_tokens=8, scheduling_policy="priority")
    leader = add(engine, "leader", [*SHARED, 50], priority=9)
    add(engine, "oldest waiter", [*SHARED[:20], 51], priority=9)
    add(engine, "other waiter", [*SHARED[:20], 52], priority=9)
    engine.checked_step()
    assert [seq.request.request_id for seq in engine.scheduler.running] == ["leader"]
    engine.reset_prefix_cache()  # so that what it computed so far cannot be hit either
    seq = engine.scheduler.running[0]
    engine.scheduler.admission.twins.lead(seq.id, seq.chain.keys.copy(), 2)  # type: ignore[union-attr]
    if ending == "abort":
        engine.abort_key(leader)
    elif ending == "error":
        engine._fail(seq.request, "came to grief")
    else:
        # An urgent sequence that needs room while the step is planned: the leader is the one to go.
        plan_decodes = engine.scheduler._plan_decodes

        def preempting(plan: object) -> None:
            plan_decodes(plan)  # type: ignore[arg-type]
            engine.scheduler._preempt(seq, plan)  # type: ignore[arg-type]
            engine.scheduler._plan_decodes = plan_decodes  # type: ignore[method-assign]

        engine.scheduler._plan_decodes = preempting  # type: ignore[method-assign]
    engine.checked_step()
    assert [key[0] for key in engine.plans[-1].chunks] == [1], "the oldest waiter leads, the other waits for it"
    engine.run()
    engine.assert_balanced()


def test_a_leader_whose_logits_are_no_numbers_publishes_nothing_and_the_waiter_leads() -> None:
    engine = make_engine(64)
    prompt = [*SHARED[:8], 50]
    engine.model.poison.add(text_hash(prompt))
    add(engine, "poisoned", prompt)
    add(engine, "waiter", [*SHARED[:8], 51])
    outputs = engine.run()
    assert outputs["poisoned"].error is not None
    assert outputs["waiter"].num_cached_tokens == 0
    assert tokens_of(outputs["waiter"]) == tokens_of(lone([*SHARED[:8], 51], GREEDY))
    engine.assert_balanced()


def test_no_waiting_without_prefix_caching_across_scopes_or_without_reading() -> None:
    engine = make_engine(64, prefix=False)
    add(engine, "a", [*SHARED, 50])
    add(engine, "b", [*SHARED[:20], 51])
    engine.checked_step()
    assert len(engine.plans[0].chunks) == 2
    engine = make_engine(64)
    add(engine, "a", [*SHARED, 50])
    add(engine, "other salt", [*SHARED[:20], 51], cache_salt="other")
    add(engine, "other adapter", [*SHARED[:4], 51], adapter="lora sha256:1")
    scored = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    engine.add_request("scored", SHARED[:4], scored)
    engine.checked_step()
    assert [key[0] for key in engine.plans[0].chunks] == [0, 1, 2, 3]
    engine.run()
    engine.assert_balanced()


def test_a_reset_while_one_waits_leaves_nobody_waiting() -> None:
    engine = make_engine(64, max_num_batched_tokens=8)
    add(engine, "leader", [*SHARED, 50])
    add(engine, "waiter", [*SHARED, 51])
    engine.checked_step()
    engine.reset_prefix_cache()
    engine.checked_step()
    assert len(engine.scheduler.running) == 2
    outputs = engine.run()
    assert tokens_of(outputs["waiter"]) == tokens_of(lone([*SHARED, 51], GREEDY))


def test_keys_of_two_leaders_pass_to_the_one_that_is_left() -> None:
    twins = Twins()
    keys = [bytes([i]) * 32 for i in range(6)]
    twins.lead("a", keys[:4], 0)
    twins.lead("b", keys, 0)
    assert twins.shared(keys, 0, 6) == ("a", 4)
    twins.published("a", 2)
    assert twins.shared(keys, 1, 6) is None
    twins.drop("a")
    assert twins.shared(keys, 2, 6) == ("b", 6)
    assert twins.shared(keys, 2, 2) is None
    twins.drop("b")
    twins.drop("b")
    assert len(twins) == 0
    assert twins.shared(keys, 2, 6) is None
