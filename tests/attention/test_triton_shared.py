"""Shared prefixes read once: the kernels against the reference, the groups against trying everything."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_case import PagedCase, paged_case

from pagedkv.attention.shared_prefix import PrefixCost, PrefixGroup, SharedPrefixes, find_groups
from pagedkv.attention.triton_backend import TritonAttention
from pagedkv.errors import InvalidRequest

EXACT = 2e-6


def grouped(case: PagedCase, groups: list[PrefixGroup] | None = None) -> PagedCase:
    """The case with its groups planned."""
    lengths = case.batch.seq_lens.tolist()
    groups = find_groups(case.tables, lengths, case.batch.block_size) if groups is None else groups
    case.batch.plans[SharedPrefixes] = SharedPrefixes.build(groups, case.batch.block_size, "cpu")
    return case


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("heads", [2, 6])
def test_one_group(splits: int, heads: int) -> None:
    case = grouped(paged_case([70, 64, 90, 65], heads=heads, shared=4))
    assert case.batch.plans[SharedPrefixes].longest == 64
    assert case.error(TritonAttention("cpu", splits=splits)) < EXACT


def test_several_groups_and_sequences_alone() -> None:
    """Two prompts in the batch, each shared by some, one sequence alone, one without a query, one padding row."""
    case = paged_case([40, 41, 38, 20, 5, 36, 4], [1, 1, 1, 1, 0, 1, 1], shared=2)
    for seq, twin in ((3, 5),):
        case.batch.block_table[seq, 0] = case.batch.block_table[twin, 0] = case.tables[seq][0]
    tables = case.batch.block_table.tolist()
    case.batch.seq_lens[6] = 0
    groups = [PrefixGroup((0, 1, 2), 2), PrefixGroup((3, 5), 1), PrefixGroup((4,), 0), PrefixGroup((6,), 0)]
    assert tables[3][0] == tables[5][0]
    grouped(case, groups)
    out = case.attend(TritonAttention("cpu", splits=2))
    torch.testing.assert_close(out[:5].double(), case.expected()[:5], atol=EXACT, rtol=0)
    assert out[5].abs().max() == 0.0


def test_more_members_than_a_tile_takes() -> None:
    case = grouped(paged_case([18] * 37, heads=8, kv_heads=1, head_dim=16, shared=1))
    assert case.error(TritonAttention("cpu")) < EXACT


@pytest.mark.parametrize("window", [5, 40, 80])
def test_every_feature_at_once(window: int) -> None:
    case = grouped(paged_case([70, 60, 90, 50], heads=6, head_dim=24, block_size=8, pool_dtype=torch.int8, shared=5))
    sinks = torch.arange(6.0)
    assert case.error(TritonAttention("cpu"), window=window, softcap=8.0, sinks=sinks) < 5e-6


def test_groups_must_cover_the_batch() -> None:
    with pytest.raises(InvalidRequest, match="each sequence of the batch once"):
        SharedPrefixes.build([PrefixGroup((0, 2), 1)], 16, "cpu")


def test_groups_of_a_nested_prefix() -> None:
    """All share block 1; two pairs share far more. Reading the pairs' blocks once saves more than block 1 for four."""
    tables = [[1, 2, 3, 4, 9], [1, 2, 3, 4, 8], [1, 5, 6, 7], [1, 5, 6, 7], [3]]
    groups = find_groups(tables, [17, 18, 16, 16, 4], 4)
    assert sorted(groups, key=lambda group: group.members) == [
        PrefixGroup((0, 1), 4), PrefixGroup((2, 3), 4), PrefixGroup((4,), 0)
    ]  # fmt: skip


def test_only_full_blocks_are_shared() -> None:
    assert find_groups([[1, 2], [1, 2]], [8, 7], 4) == [PrefixGroup((1, 0), 1)]
    assert find_groups([[1], [1]], [3, 3], 4) == [PrefixGroup((0,), 0), PrefixGroup((1,), 0)]
    assert find_groups([], [], 4) == []


@given(st.lists(st.lists(st.integers(0, 1), max_size=4), max_size=5))
@settings(max_examples=60, deadline=None)
def test_groups_are_right_and_save_the_most(walks: list[list[int]]) -> None:
    """Tables are walks in a binary tree; no partition into groups at a common depth saves more."""
    tables = [[int("1" + "".join(map(str, walk[: i + 1])), 2) for i in range(len(walk))] for walk in walks]
    groups = find_groups(tables, [len(table) for table in tables], 1)
    assert sorted(seq for group in groups for seq in group.members) == list(range(len(tables)))
    for group in groups:
        assert len({tuple(tables[seq][: group.num_blocks]) for seq in group.members}) == 1
        assert all(len(tables[seq]) >= group.num_blocks for seq in group.members)
    assert sum(group.blocks_saved for group in groups) == _most(tuple(map(tuple, tables)))


def _most(tables: tuple[tuple[int, ...], ...]) -> int:
    """Blocks saved by the best partition, by trying every set that the first table may be grouped with."""
    if not tables:
        return 0
    first, rest = tables[0], tables[1:]
    best = 0
    for count in range(len(rest) + 1):
        for mates in itertools.combinations(range(len(rest)), count):
            chosen = [first, *(rest[i] for i in mates)]
            depth = 0
            while all(len(t) > depth and t[depth] == first[depth] for t in chosen if len(first) > depth):
                if depth == len(first):
                    break
                depth += 1
            left = tuple(t for i, t in enumerate(rest) if i not in mates)
            best = max(best, count * depth + _most(left))
    return best


def test_the_cost_model_weighs_bytes_against_launches() -> None:
    cost = PrefixCost(bytes_per_token=4096, part_bytes_per_seq=32 * 129 * 4, launch_bytes=12_000_000)
    long = [PrefixGroup(tuple(range(64)), 512)]  # 64 sequences, 8k shared: 2 GB saved per layer
    assert cost.pays(long, 16)
    assert not cost.pays([PrefixGroup((0, 1), 4)], 16)
    assert not cost.pays([PrefixGroup((0,), 0), PrefixGroup((1,), 0)], 16)
    near = [PrefixGroup((0, 1), 366)]  # 24.0 MB saved, just below the two launches and the parts
    assert not cost.pays(near, 16)
    assert cost.pays([PrefixGroup((0, 1), 370)], 16)
