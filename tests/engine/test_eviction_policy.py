"""The engine under each eviction policy: answers stay those of a lone run, and a queue-aware one hears of the queue."""

from __future__ import annotations

from typing import get_args

import pytest
from fake_engine import lone, make_engine, tokens_of

from pagedkv.cache.policies import POLICIES
from pagedkv.config import EvictionPolicyName
from pagedkv.engine.params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6)


def test_the_configuration_names_every_policy() -> None:
    assert set(get_args(EvictionPolicyName)) == set(POLICIES)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_answers_under_pressure_are_those_of_a_lone_run(policy: str) -> None:
    engine = make_engine(20, eviction_policy=policy, max_num_seqs=4)
    prompts = {str(i): [i % 3] * 9 + [i] * (5 + i % 4) for i in range(24)}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, GREEDY)
    outputs = engine.run()
    for name, prompt in prompts.items():
        assert tokens_of(outputs[name]) == tokens_of(lone(prompt, GREEDY)), name
    engine.assert_balanced()
    assert engine.scheduler.prefix is not None
    assert engine.scheduler.prefix.stats.evicted_blocks > 0, "there was no pressure"


def test_queue_aware_spares_what_a_waiting_request_will_attach() -> None:
    reused = {}
    for policy in ("lru", "queue-aware"):
        engine = make_engine(12, eviction_policy=policy, max_num_seqs=1, scheduling_policy="fcfs")
        chat = [7] * 16
        engine.add_request("first turn", chat, GREEDY)
        engine.run()
        for i in range(6):  # strangers of five blocks each come before the second turn
            engine.add_request(str(i), [20 + i] * 16, GREEDY)
        engine.add_request("second turn", [*chat, 1, 2, 3], GREEDY)
        reused[policy] = engine.run()["second turn"].num_cached_tokens
        engine.assert_balanced()
    assert reused == {"lru": 0, "queue-aware": 16}
