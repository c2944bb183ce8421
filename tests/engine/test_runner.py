"""Which tokens of a step the model is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pagedkv.engine.plan import Chunk, StepPlan
from pagedkv.engine.runner import Wanted


def plan_of(*chunks: tuple[int, int, int, list[None] | None]) -> tuple[StepPlan, list[int]]:
    """(start, new tokens, tokens of the sequence, prompt log-probabilities so far or None) -> plan and ends."""
    plan, ends = StepPlan(), []
    for key, (start, new, length, scored) in enumerate(chunks):
        seq: Any = SimpleNamespace(num_tokens=length, request=SimpleNamespace(prompt_logprobs=scored))
        plan.chunks[key] = Chunk(seq, start, new)
        plan.num_tokens += new
        ends.append(plan.num_tokens - 1)
    return plan, ends


def test_a_step_of_decodes_wants_every_row() -> None:
    assert Wanted.of(*plan_of((9, 1, 10, None), (4, 1, 5, None))) == (None, [0, 1])


def test_a_prefill_gives_its_last_row_and_an_unfinished_one_none() -> None:
    wanted = Wanted.of(*plan_of((9, 1, 10, None), (0, 7, 7, None), (0, 5, 20, None), (3, 4, 7, None)))
    assert wanted.rows == [0, 7, 16]
    assert [wanted.ends[i] for i in (0, 1, 3)] == [0, 1, 2]
    assert Wanted.of(*plan_of((0, 5, 20, None))).rows == []


def test_a_prompt_whose_log_probabilities_are_wanted_gives_all_its_rows() -> None:
    wanted = Wanted.of(*plan_of((0, 3, 3, None), (2, 4, 9, []), (0, 2, 2, None)))
    assert wanted == ([2, 3, 4, 5, 6, 8], [0, 4, 5])
