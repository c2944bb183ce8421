"""AttentionBatch: what build makes of host lists, and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pagedkv.attention.batch import AttentionBatch
from pagedkv.errors import InvalidRequest


def test_build_describes_a_mixed_batch() -> None:
    batch = AttentionBatch.build([[5, 1, 7], [2]], seq_lens=[10, 3], query_lens=[1, 3], block_size=4)
    assert batch.query_start.tolist() == [0, 1, 4]
    assert batch.seq_lens.tolist() == [10, 3]
    assert batch.block_table.tolist() == [[5, 1, 7], [2, 0, 0]]
    assert batch.positions.tolist() == [9, 0, 1, 2]
    assert batch.slot_mapping.tolist() == [7 * 4 + 1, 8, 9, 10]
    assert (batch.max_query_len, batch.max_seq_len, batch.num_seqs, batch.num_tokens) == (3, 10, 2, 4)


def test_build_takes_an_empty_batch_and_a_sequence_without_new_tokens() -> None:
    assert AttentionBatch.build([], [], [], 16).num_tokens == 0
    batch = AttentionBatch.build([[3], []], [5, 0], [0, 0], 16)
    assert batch.num_seqs == 2
    assert batch.num_tokens == 0


@pytest.mark.parametrize(
    ("tables", "seq_lens", "query_lens", "block_size", "field"),
    [
        ([[1]], [5], [1], 4, "seq_lens"),
        ([[1]], [4], [5], 4, "query_lens"),
        ([[1]], [4], [-1], 4, "query_lens"),
        ([[1], [2]], [4], [1], 4, "tables"),
        ([[1]], [4], [1], 0, "block_size"),
    ],
)
def test_build_names_what_does_not_fit(
    tables: list[list[int]], seq_lens: list[int], query_lens: list[int], block_size: int, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        AttentionBatch.build(tables, seq_lens, query_lens, block_size)
    assert caught.value.field == field


def test_a_replaced_batch_starts_without_plans() -> None:
    batch = AttentionBatch.build([[1]], [4], [1], 4)
    batch.plans["native"] = "made for the old table"
    assert dataclasses.replace(batch, block_table=torch.zeros(1, 1, dtype=torch.int32)).plans == {}
