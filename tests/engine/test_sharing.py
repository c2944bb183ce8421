"""What requests share and what they must not: the fault cases of kinds 2 and 3 that need no real model."""

from __future__ import annotations

import random

import pytest
from fake_engine import VOCAB, lone, make_engine, tokens_of

from pagedkv.cache.keys import MediaSpan
from pagedkv.engine.params import SamplingParams

B = 4


def greedy(max_tokens: int = 4) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def text(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCAB) for _ in range(length)]


def test_b04_every_ending_leaves_the_ledger_balanced() -> None:
    for length in (1, B - 1, B, B + 1, 2 * B):
        for max_tokens in (1, 2, B - 1, B, B + 1):
            engine = make_engine(32)
            engine.add_request("x", text(length), greedy(max_tokens))
            output = engine.run()["x"]
            assert len(output.outputs[0].token_ids) == max_tokens
            engine.assert_balanced()
            computed = length + max_tokens - 1  # the last token is never run
            assert engine.stats().blocks_cached == computed // B


def test_b19_whole_prompt_cached_at_block_multiple() -> None:
    """The documented rule: all but one token can be hit, full blocks and a part of one."""
    for length in range(1, 3 * B + 2):
        engine = make_engine(64)
        prompt = text(length)
        engine.add_request("first", prompt, greedy())
        first = tokens_of(engine.run()["first"])
        computed = engine.stats().prefill_tokens
        assert computed == length
        engine.add_request("again", prompt, greedy())
        again = engine.run()["again"]
        assert tokens_of(again) == first
        assert again.num_cached_tokens == length - 1, "its own answer filled the block, so all but one token is there"
        assert engine.stats().prefill_tokens == computed + 1
        for name, other in (("shorter", prompt[: length - 1]), ("longer", [*prompt, 7])):
            if other:
                engine.add_request(name, other, greedy())
                output = engine.run()[name]
                assert tokens_of(output) == tokens_of(lone(other, greedy()))
                assert output.num_cached_tokens >= (len(other) - 1) // B * B
        engine.assert_balanced()


def test_b20_a_waiting_request_whose_prefix_is_evicted_before_it_runs() -> None:
    engine = make_engine(14, max_num_seqs=4)
    shared = text(20)
    asked = {str(i): [*shared, *text(2 + i, i)] for i in range(8)}
    for name, prompt in asked.items():
        engine.add_request(name, prompt, greedy(24))
    outputs = {}
    while engine.has_unfinished():
        assert engine.scheduler.prefix is not None
        engine.scheduler.prefix.evict(3)  # a foreign request takes idle blocks between two steps
        outputs.update((output.request_id, output) for output in engine.checked_step())
        for chunk in engine.plans[-1].chunks.values():
            assert chunk.num_tokens >= 1
    assert engine.stats().num_preemptions >= 5
    for name, prompt in asked.items():
        assert tokens_of(outputs[name]) == tokens_of(lone(prompt, greedy(24)))
    engine.assert_balanced()


def test_b21_a_burst_of_equal_prompts_is_computed_once_and_a_later_one_hits_while_they_run() -> None:
    engine = make_engine(256, max_num_seqs=16, max_num_batched_tokens=128)
    prompt = text(10 * B)
    for i in range(8):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=30 + i % 3))
    for _ in range(6):
        engine.checked_step()
    assert engine.stats().prefill_tokens == 10 * B + 7  # the whole prompt once, one token of it for each other
    engine.add_request("ninth", prompt, greedy(10))
    outputs = engine.run()
    expected = tokens_of(lone(prompt, greedy(32)))[0]
    for i in range(8):
        assert tokens_of(outputs[str(i)])[0] == expected[: 30 + i % 3]
    assert outputs["ninth"].num_cached_tokens == 10 * B - 1
    engine.assert_balanced()


def test_b25_a_salt_separates_and_still_hits_itself() -> None:
    engine = make_engine(256, max_num_batched_tokens=128)
    prompt = text(64)
    cached = []
    for name, salt in (("first A", "A"), ("first B", "B"), ("none", None), ("second A", "A"), ("second B", "B")):
        engine.add_request(name, prompt, greedy(), cache_salt=salt)
        cached.append(engine.run()[name].num_cached_tokens)
    assert cached == [0, 0, 0, 63, 63]


def test_b13_an_adapter_separates_and_is_not_a_salt() -> None:
    engine = make_engine(256, max_num_batched_tokens=128)
    prompt = text(32)
    cached = []
    for i, options in enumerate(
        ({}, {"adapter": "x"}, {"cache_salt": "x"}, {"adapter": "x:0.5"}, {"adapter": "x"}, {"cache_salt": "x"}, {})
    ):
        engine.add_request(str(i), prompt, greedy(), **options)
        cached.append(engine.run()[str(i)].num_cached_tokens)
    assert cached == [0, 0, 0, 0, 31, 31, 31]


def test_b15_media_are_part_of_the_key_from_their_block_on() -> None:
    engine = make_engine(256, max_num_batched_tokens=128)
    prompt = text(40)
    picture, other = b"digest of a picture", b"digest of another."
    spans = [
        ("x", [MediaSpan(8, 16, "image", picture)], 0),
        ("y", [MediaSpan(8, 16, "image", other)], 8),
        ("x moved", [MediaSpan(9, 16, "image", picture)], 8),
        ("x again", [MediaSpan(8, 16, "image", picture)], 39),
        ("none", [], 8),
    ]
    for name, media, expected in spans:
        engine.add_request(name, prompt, greedy(1), media=media)
        assert engine.run()[name].num_cached_tokens == expected, name
    engine.assert_balanced()


def test_b26_a_request_s_own_chunks_are_no_hits_and_a_preemption_changes_nothing() -> None:
    engine = make_engine(300, max_num_batched_tokens=128)
    engine.add_request("x", text(1000), greedy(2))
    engine.run()
    stats = engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (1000, 0)
    engine.add_request("scored", text(40), SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
    output = engine.run()["scored"]
    assert output.num_cached_tokens == 0
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 40
    assert engine.stats().prefix_queries == 1000, "who may not read the cache does not count as a miss"
    engine.add_request("preempted", text(40, 5), greedy(8))
    engine.checked_step()
    engine.checked_step()
    seq = engine.scheduler.running[0]
    engine.scheduler._preempt(seq, engine.plans[-1])
    engine.runner.release([seq])
    output = engine.run()["preempted"]
    assert output.num_cached_tokens == 0, "it refers to the first admission"
    assert output.metrics.num_preemptions == 1
    assert (engine.stats().prefix_queries, engine.stats().prefix_hits) == (1040, 0)
    assert tokens_of(output) == tokens_of(lone(text(40, 5), greedy(8)))


def test_b27_sixteen_clients_with_secrets_on_a_small_pool() -> None:
    """A fake token depends on every slot that is read, so a foreign block would change the answer."""
    engine = make_engine(40, max_num_seqs=6, max_num_batched_tokens=32)
    generator = random.Random(1)
    system = text(12, 99)
    asked = {}
    for i in range(200):
        client = i % 16
        asked[str(i)] = [*system, *text(6, 1000 + client), *text(generator.randrange(1, 9), i)]
        engine.add_request(str(i), asked[str(i)], greedy(5))
    outputs = engine.run()
    for name in random.Random(2).sample(sorted(asked), 60):
        assert tokens_of(outputs[name]) == tokens_of(lone(asked[name], greedy(5)))
    engine.assert_balanced()


def test_b29_companions_order_and_chunks_change_nothing() -> None:
    probe, expected = text(23, 7), tokens_of(lone(text(23, 7), greedy(9)))
    for companions in (0, 1, 7, 31, 63):
        for budget, seats in ((70, 64), (96, 8)):
            engine = make_engine(1024, max_num_seqs=seats, max_num_batched_tokens=budget)
            at = companions // 2
            for i in range(companions + 1):
                engine.add_request("probe" if i == at else str(i), probe if i == at else text(3 + i % 17, i), greedy(9))
            assert tokens_of(engine.run()["probe"]) == expected


def test_b34_a_request_gains_a_token_only_in_a_step_in_which_it_ran() -> None:
    engine = make_engine(512, max_num_seqs=16, max_num_batched_tokens=20)
    asked = {str(i): text(4 + i % 5, i) for i in range(14)} | {f"long {i}": text(200, 50 + i) for i in range(2)}
    for name, prompt in asked.items():
        engine.add_request(name, prompt, greedy(12))
    lengths: dict[str, int] = {}
    outputs = {}
    while engine.has_unfinished():
        for output in engine.checked_step():
            outputs[output.request_id] = output
            lengths[output.request_id] = lengths.get(output.request_id, 0) + 1
            assert len(output.outputs[0].token_ids) == lengths[output.request_id], "one token a step, in its own steps"
    for name, prompt in asked.items():
        assert tokens_of(outputs[name]) == tokens_of(lone(prompt, greedy(12)))


@pytest.mark.parametrize("length", [0, 1, B - 1, B, 3 * B])
@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize(
    "params",
    [greedy(16), SamplingParams(temperature=1, seed=4, max_tokens=16), SamplingParams(n=2, seed=4, max_tokens=16)],
)
def test_b35_preempted_at_any_length_any_number_of_times(length: int, times: int, params: SamplingParams) -> None:
    engine = make_engine(64, max_num_batched_tokens=8)
    engine.add_request("x", text(10), params)
    left = times
    streamed: dict[int, list[int]] = {}
    output = None
    for _ in range(400):
        if not engine.has_unfinished():
            break
        for output in engine.checked_step():
            for sample in output.outputs:
                before = streamed.get(sample.index, [])
                assert list(sample.token_ids)[: len(before)] == before, "what was streamed is never taken back"
                streamed[sample.index] = list(sample.token_ids)
        running = list(engine.scheduler.running)
        if left and running and all(seq.num_output_tokens >= length for seq in running):
            left -= 1
            engine.scheduler._preempt(running[-1], engine.plans[-1])
            engine.runner.release(running[-1:])
            if left == times - 2:
                assert engine.scheduler.prefix is not None
                engine.scheduler.prefix.evict(1000)  # nothing of it is left in the cache
    assert output is not None
    assert [streamed[i] for i in sorted(streamed)] == tokens_of(lone(text(10), params))
    assert output.metrics.num_preemptions == times
    assert all(sample.finish_reason == "length" for sample in output.outputs)
    engine.assert_balanced()


def test_prompt_logprobs_are_the_same_in_chunks_after_preemption_and_beside_a_warm_cache() -> None:
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, logprobs=1)
    prompt = text(30)
    expected = lone(prompt, params)
    engine = make_engine(64, max_num_batched_tokens=8)
    engine.add_request("warm", prompt, greedy())
    engine.run()
    engine.add_request("x", prompt, params)
    for _ in range(2):
        engine.checked_step()
    seq = engine.scheduler.running[0]
    engine.scheduler._preempt(seq, engine.plans[-1])
    engine.runner.release([seq])
    output = engine.run()["x"]
    assert output.prompt_logprobs == expected.prompt_logprobs
    assert output.outputs[0].logprobs == expected.outputs[0].logprobs
    assert output.outputs[0].cumulative_logprob == expected.outputs[0].cumulative_logprob


def test_scoring_without_generating() -> None:
    engine = make_engine()
    engine.add_request("x", text(9), SamplingParams(max_tokens=0, prompt_logprobs=1))
    output = engine.run()["x"]
    assert output.finished
    assert output.outputs[0].finish_reason == "length"
    assert list(output.outputs[0].token_ids) == []
    assert output.prompt_logprobs is not None
    assert [entry is None for entry in output.prompt_logprobs] == [True] + [False] * 8
    engine.assert_balanced()


def test_reset_leaves_blocks_in_use_and_says_how_many() -> None:
    engine = make_engine(64)
    engine.add_request("x", text(20), greedy(10))
    engine.checked_step()
    assert engine.reset_prefix_cache() == (False, 5)
    engine.add_request("y", text(20), greedy(2))
    outputs = engine.run()
    assert outputs["y"].num_cached_tokens == 0, "blocks of a sequence that ran during the reset are not published again"
    assert engine.reset_prefix_cache() == (True, 0)
    assert engine.stats().blocks_free == 64
