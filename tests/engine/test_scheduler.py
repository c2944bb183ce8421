"""Scheduling: the budget, admission, preemption, policies; the fault cases of kind 4."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine, lone, make_engine, tokens_of

from pagedkv.engine.params import SamplingParams
from pagedkv.errors import InvalidRequest, QueueFull, RequestTooLong


def greedy(max_tokens: int = 4, **options: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)  # type: ignore[arg-type]


def prompt(number: int, length: int) -> list[int]:
    """Prompts of different numbers share nothing."""
    return [number % 64, *((number * 7 + i) % 64 for i in range(length - 1))]


def names(engine: FakeEngine) -> list[str]:
    return [seq.request.request_id for seq in engine.scheduler.running]


def assert_like_lone(engine: FakeEngine, asked: dict[str, tuple[list[int], SamplingParams]]) -> None:
    outputs = engine.run()
    for name, (ids, params) in asked.items():
        assert outputs[name].error is None
        assert tokens_of(outputs[name]) == tokens_of(lone(ids, params)), name
    engine.assert_balanced()


def test_decodes_come_first_and_prefills_fill_the_budget() -> None:
    engine = make_engine(128, max_num_batched_tokens=16, prefix=False)
    engine.add_request("short", prompt(1, 5), greedy(8))
    engine.checked_step()
    engine.add_request("long", prompt(2, 40), greedy(2))
    for expected in (15, 15, 10):
        engine.checked_step()
        chunks = list(engine.plans[-1].chunks.values())
        assert (chunks[0].num_tokens, chunks[1].num_tokens) == (1, expected)
        assert engine.model.batches[-1] == (1 + expected, 2), "one forward pass for both"
    assert_like_lone(engine, {"short": (prompt(1, 5), greedy(8)), "long": (prompt(2, 40), greedy(2))})


def test_without_chunked_prefill_a_prompt_runs_in_one_step() -> None:
    engine = make_engine(128, max_num_batched_tokens=16, enable_chunked_prefill=False, max_model_len=16)
    asked = {str(i): (prompt(i, 10), greedy(3)) for i in range(4)}
    for name, (ids, params) in asked.items():
        engine.add_request(name, ids, params)
    assert_like_lone(engine, asked)
    for plan in engine.plans:
        assert all(chunk.num_tokens in (1, 10) for chunk in plan.chunks.values())


def test_never_more_sequences_than_max_num_seqs_and_samples_count() -> None:
    engine = make_engine(256, max_num_seqs=4)
    asked = {str(i): (prompt(i, 6), greedy(5, n=1 + i % 3)) for i in range(9)}
    for name, (ids, params) in asked.items():
        engine.add_request(name, ids, params)
    assert_like_lone(engine, asked)  # FakeEngine.check counts the running ones


def test_more_samples_than_seats_run_in_turns() -> None:
    engine = make_engine(256, max_num_seqs=3)
    params = SamplingParams(n=8, temperature=1.0, seed=3, max_tokens=6)
    engine.add_request("many", prompt(1, 9), params)
    assert_like_lone(engine, {"many": (prompt(1, 9), params)})


def test_forked_samples_share_the_prompt_and_copy_only_its_last_block() -> None:
    """A 40-token prompt takes 3 blocks of 16; four samples copy the last one three times, the last owner writes it."""
    engine = make_engine(64, 16)
    engine.add_request("x", prompt(1, 40), SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=8))
    engine.checked_step()
    assert engine.stats().allocated_blocks == 3
    engine.run()
    assert (engine.stats().allocated_blocks, engine.stats().copied_blocks) == (6, 3)


def test_preemption_takes_the_newest_and_every_answer_stays_whole() -> None:
    engine = make_engine(12, max_num_batched_tokens=32)
    asked = {str(i): (prompt(i, 9), greedy(24)) for i in range(4)}
    for name, (ids, params) in asked.items():
        engine.add_request(name, ids, params)
    victims = []
    while engine.has_unfinished():
        running = names(engine)
        engine.checked_step()
        for seq in engine.plans[-1].preempted:
            victims.append(seq.request.request_id)
            assert victims[-1] == max(running), "the newest goes first"
    stats = engine.stats()
    assert stats.num_preemptions == len(victims) >= 2
    assert stats.recomputed_tokens > 0
    assert "0" not in victims, "the oldest is never preempted"


def test_under_priority_the_least_urgent_goes_even_if_it_is_in_the_plan_already() -> None:
    engine = make_engine(8, scheduling_policy="priority")
    asked = {"patient": (prompt(1, 10), greedy(14)), "urgent": (prompt(2, 13), greedy(18))}
    engine.add_request("patient", *asked["patient"], priority=5)
    engine.checked_step()  # it runs first, so every later step plans it before the urgent one
    engine.add_request("urgent", *asked["urgent"], priority=0)
    preempted = []
    outputs = {}
    while engine.has_unfinished():
        outputs.update((output.request_id, output) for output in engine.checked_step())
        plan = engine.plans[-1]
        preempted += [seq.request.request_id for seq in plan.preempted]
        assert not {seq.id for seq in plan.preempted} & set(plan.chunks), "who was preempted does not run"
        assert plan.num_tokens == sum(chunk.num_tokens for chunk in plan.chunks.values())
    assert set(preempted) == {"patient"}
    for name, (ids, params) in asked.items():
        assert tokens_of(outputs[name]) == tokens_of(lone(ids, params))
    assert outputs["patient"].metrics.num_preemptions == len(preempted)


def test_a_sequence_alone_in_the_pool_that_runs_dry_ends_with_what_it_has() -> None:
    engine = make_engine(4, max_model_len=1000)
    engine.add_request("x", prompt(1, 10), greedy(100))
    output = engine.run()["x"]
    sample = output.outputs[0]
    assert sample.finish_reason == "length"
    assert list(sample.token_ids) == tokens_of(lone(prompt(1, 10), greedy(7)))[0]  # 16 positions, and one token more
    engine.assert_balanced()


def test_priority_orders_admissions_and_age_bounds_the_wait() -> None:
    engine = make_engine(64, max_num_seqs=1, scheduling_policy="priority", max_overtakes=3)
    engine.add_request("running", prompt(0, 4), greedy(2))
    engine.checked_step()
    engine.add_request("patient", prompt(1, 4), greedy(1), priority=9)
    for i in range(6):
        engine.add_request(f"urgent {i}", prompt(2 + i, 4), greedy(1), priority=0)
    engine.run()
    order = [seq.request.request_id for plan in engine.plans for seq in plan.admitted]
    assert order == ["running", *(f"urgent {i}" for i in range(3)), "patient", *(f"urgent {i}" for i in range(3, 6))]


def test_lpm_takes_the_longest_cached_prefix_first_and_the_oldest_of_equals() -> None:
    engine = make_engine(64, max_num_seqs=1)
    engine.add_request("warm", prompt(1, 20), greedy(1))
    engine.run()
    engine.add_request("cold", prompt(2, 20), greedy(1))
    engine.add_request("half", [*prompt(1, 20)[:8], *prompt(3, 12)], greedy(1))
    engine.add_request("whole", [*prompt(1, 20), 9], greedy(1))
    engine.add_request("cold too", prompt(4, 20), greedy(1))
    engine.run()
    order = [seq.request.request_id for plan in engine.plans for seq in plan.admitted]
    assert order[1:] == ["whole", "half", "cold", "cold too"]


def test_lpm_nobody_waits_for_more_than_the_bound() -> None:
    engine = make_engine(64, max_num_seqs=1, max_overtakes=5)
    engine.add_request("warm", prompt(1, 20), greedy(1))
    engine.run()
    engine.add_request("cold", prompt(2, 20), greedy(1))
    started: list[str] = []
    for i in range(20):
        engine.add_request(f"hot {i}", [*prompt(1, 20), i], greedy(1))
        engine.checked_step()
        started += [seq.request.request_id for seq in engine.plans[-1].admitted]
    assert started.index("cold") == 5


def test_fcfs_is_the_order_of_arrival() -> None:
    engine = make_engine(64, max_num_seqs=1, scheduling_policy="fcfs")
    engine.add_request("warm", prompt(1, 20), greedy(1))
    engine.run()
    for i, ids in enumerate((prompt(2, 8), [*prompt(1, 20), 3], prompt(3, 8))):
        engine.add_request(str(i), ids, greedy(1))
    engine.run()
    assert [seq.request.request_id for plan in engine.plans for seq in plan.admitted][1:] == ["0", "1", "2"]


def test_the_queue_is_bounded() -> None:
    engine = make_engine(max_num_queued_reqs=2)
    engine.add_request("a", prompt(1, 4), greedy())
    engine.add_request("b", prompt(2, 4), greedy())
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        engine.add_request("c", prompt(3, 4), greedy())
    engine.run()
    engine.add_request("c", prompt(3, 4), greedy())
    engine.run()
    engine.assert_balanced()


# ---- fault cases of kind 4 ----


def test_b42_what_never_fits_is_refused_at_once_and_blocks_nobody() -> None:
    engine = make_engine(8, 16, max_model_len=1024)
    with pytest.raises(RequestTooLong, match=r"200 tokens.*128"):
        engine.add_request("too long", prompt(1, 200), greedy())
    engine.add_request("grows too long", prompt(2, 100), greedy(200))
    engine.add_request("eight samples", prompt(3, 60), greedy(10, n=8))
    engine.add_request("short", prompt(4, 10), greedy(3))
    outputs = engine.run()
    assert outputs["grows too long"].outputs[0].finish_reason == "length"
    assert len(outputs["grows too long"].outputs[0].token_ids) == 29
    assert tokens_of(outputs["eight samples"]) == tokens_of(lone(prompt(3, 60), greedy(10, n=8)))
    assert tokens_of(outputs["short"]) == tokens_of(lone(prompt(4, 10), greedy(3)))
    engine.assert_balanced()


@pytest.mark.parametrize(("length", "served"), [(31, True), (32, False), (33, False), (64, False)])
def test_b44_a_prompt_at_the_limit_is_an_error_with_both_numbers_or_an_answer(length: int, served: bool) -> None:
    engine = make_engine(64, max_model_len=32)
    engine.add_request("other", prompt(9, 4), greedy(5))
    if served:
        engine.add_request("x", prompt(1, length), greedy(5))
        sample = engine.run()["x"].outputs[0]
        assert (len(sample.token_ids), sample.finish_reason) == (1, "length")
    else:
        with pytest.raises(RequestTooLong, match=rf"{length} tokens.*32"):
            engine.add_request("x", prompt(1, length), greedy(5))
        assert len(engine.run()["other"].outputs[0].token_ids) == 5
    engine.assert_balanced()


@pytest.mark.parametrize("prefix", [False, True])
def test_b45_two_long_prompts_do_not_throw_each_other_out(prefix: bool) -> None:
    engine = make_engine(20, prefix=prefix, max_num_batched_tokens=8)
    asked = {str(i): (prompt(i, 48), greedy(6)) for i in range(2)}
    for name, (ids, params) in asked.items():
        engine.add_request(name, ids, params)
    assert_like_lone(engine, asked)
    stats = engine.stats()
    assert stats.prefill_tokens <= 2 * 96
    assert stats.num_preemptions <= 1


def test_b46_big_and_small_requests_both_make_progress() -> None:
    engine = make_engine(40, max_num_seqs=4, max_overtakes=8, prefix=False)
    for i in range(2):
        engine.add_request(f"first {i}", prompt(10 * i, 16), greedy(30))
    engine.checked_step()
    engine.add_request("big", prompt(1, 140), greedy(4))  # 36 of 40 blocks: it must wait until nearly all is free
    started: dict[str, int] = {}
    for i in range(60):
        engine.add_request(f"small {i}", prompt(2 + i, 8), greedy(6))
        engine.checked_step()
        started.update((seq.request.request_id, i) for seq in engine.plans[-1].admitted)
    assert "big" in started
    overtakers = [name for name, at in started.items() if name.startswith("small") and at < started["big"]]
    assert 0 < len(overtakers) <= 8, "small ones pass it, but no more of them than the bound"
    engine.run()
    engine.assert_balanced()


def test_b46_short_prompts_pass_one_of_fifty_chunks() -> None:
    engine = make_engine(256, max_num_batched_tokens=8, prefix=False)
    engine.add_request("long", prompt(0, 400), greedy(2))
    for _ in range(3):
        engine.checked_step()
    engine.add_request("short", prompt(1, 8), greedy(2))
    first = {}
    for step in range(12):
        for output in engine.checked_step():
            first.setdefault(output.request_id, step)
    assert first["short"] <= 3
    assert "long" not in first
    engine.run()


def test_b47_a_hit_that_cannot_be_completed_fails_cleanly_and_one_that_can_succeeds() -> None:
    engine = make_engine(6, max_num_seqs=2, max_model_len=100)
    engine.add_request("x", prompt(1, 16), greedy(1))
    engine.run()
    for _ in range(50):
        with pytest.raises(RequestTooLong):
            engine.add_request("seven blocks", [*prompt(1, 16), *prompt(2, 12)], greedy(1))
        engine.add_request("six blocks", [*prompt(1, 16), *prompt(3, 8)], greedy(1))
        output = engine.run()["six blocks"]
        assert output.num_cached_tokens >= 16
        engine.assert_balanced()


def test_b50_four_requests_of_half_the_pool_each_get_their_whole_answer() -> None:
    engine = make_engine(16)
    asked = {str(i): (prompt(i, 8), greedy(24)) for i in range(4)}
    for name, (ids, params) in asked.items():
        engine.add_request(name, ids, params)
    assert_like_lone(engine, asked)


@pytest.mark.parametrize("num_blocks", [5, 8, 13])
def test_b51_a_pool_with_no_room_for_a_cache_still_answers_a_hundred_prompts(num_blocks: int) -> None:
    engine = make_engine(num_blocks)
    asked = {str(i): (prompt(i, 5 + i % 9), greedy(3)) for i in range(100)}
    for name, (ids, params) in asked.items():
        engine.add_request(name, ids, params)
    assert_like_lone(engine, asked)


def test_b52_no_length_gives_an_empty_answer() -> None:
    engine = make_engine(80, max_model_len=300, max_num_batched_tokens=48)
    for length in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 299):
        for _ in range(2):
            engine.add_request("x", prompt(length, length), greedy(2))
            assert tokens_of(engine.run()["x"]) == tokens_of(lone(prompt(length, length), greedy(2), max_model_len=300))
    engine.assert_balanced()


def test_b53_the_budget_holds_when_cached_tokens_vanish_between_steps() -> None:
    engine = make_engine(60, max_num_batched_tokens=64, max_num_seqs=12)
    shared = prompt(1, 48)
    engine.add_request("warm", shared, greedy(1))
    engine.run()
    for i in range(10):
        engine.add_request(str(i), [*shared, *prompt(20 + i, 12)], greedy(2))
    engine.add_request("foreign", prompt(50, 60), greedy(2))
    engine.checked_step()
    assert engine.scheduler.prefix is not None
    engine.scheduler.prefix.evict(60)
    engine.run()  # make_engine checks every plan against the budget
    engine.assert_balanced()


def test_bad_settings_name_the_field() -> None:
    with pytest.raises(InvalidRequest, match="max_num_batched_tokens"):
        make_engine(max_num_seqs=8, max_num_batched_tokens=4)
    with pytest.raises(InvalidRequest, match="scheduling_policy"):
        make_engine(scheduling_policy="random")
