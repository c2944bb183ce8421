"""Shared prefixes of decode steps: found when sequences join or leave, and only where they pay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pagedkv.attention.batch import AttentionBatch
from pagedkv.attention.shared_prefix import PrefixCost, SharedPrefixes
from pagedkv.engine import sharing
from pagedkv.engine.sharing import PrefixSharing

TABLES = {"a": [3, 5, 1], "b": [3, 5, 2], "c": [7, 8, 9]}
FREE = PrefixCost(bytes_per_token=100, part_bytes_per_seq=0, launch_bytes=0)


def step(ids: list[str], start: int = 9, new: int = 1) -> tuple[Any, AttentionBatch]:
    """A plan of chunks that begin at ``start``, and its batch. Blocks of 4."""
    chunks = {name: SimpleNamespace(start=start, num_tokens=new) for name in ids}
    tables = [TABLES[name] for name in ids]
    return SimpleNamespace(chunks=chunks), AttentionBatch.build(tables, [start + new] * len(ids), [new] * len(ids), 4)


def finder(cost: PrefixCost = FREE) -> PrefixSharing:
    manager: Any = SimpleNamespace(tables=TABLES, block_size=4)
    return PrefixSharing(manager, cost, "cpu")


def test_a_decode_step_gets_its_groups() -> None:
    plan, batch = step(["a", "c", "b"])
    finder().add(plan, batch)
    found = batch.plans[SharedPrefixes]
    assert found.shared_lens.tolist() == [8, 0, 8]
    assert found.longest == 8
    assert sorted(found.members.tolist()) == [0, 1, 2]


def test_groups_are_looked_for_again_only_for_other_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    real = sharing.find_groups
    monkeypatch.setattr(sharing, "find_groups", lambda *a: looked.append(a) or real(*a))
    prefixes = finder()
    for ids in (["a", "b"], ["a", "b"], ["a", "b", "c"], ["b", "a"]):
        plan, batch = step(ids)
        prefixes.add(plan, batch)
        assert SharedPrefixes in batch.plans
    assert len(looked) == 3


def test_what_does_not_pay_is_left_alone() -> None:
    for ids, cost in ((["a", "c"], FREE), (["a", "b"], PrefixCost(100, 0, launch_bytes=400))):
        plan, batch = step(ids)
        finder(cost).add(plan, batch)
        assert batch.plans == {}


def test_steps_with_prefill_are_left_alone() -> None:
    plan, batch = step(["a", "b"], new=2)
    finder().add(plan, batch)
    assert batch.plans == {}
