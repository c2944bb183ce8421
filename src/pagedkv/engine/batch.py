"""StepPlan -> the tensors of one forward pass, with work that follows the changes and not the context.

Owns one row of a persistent table for every running sequence. A row is copied from the cache's block table only when
that changed (a new block, a copy-on-write, a duplicate given up: about once in ``block_size`` steps); everything else
of a step is a handful of numpy calls over the whole batch.

    rows:        sequence -> row of ``_table`` [max_num_seqs, W] int32, given back when the sequence leaves
    token t:     position = start + (t - first token of its sequence)
                 slot = table[row, position // b] * b + position % b
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.attention.batch import AttentionBatch
from pagedkv.cache.manager import KVCacheManager
from pagedkv.engine.plan import Chunk, StepPlan
from pagedkv.engine.request import Sequence

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """token_ids int64 [T] of the chunks one after another;  ends: the row in T of each chunk's last token."""

    token_ids: torch.Tensor
    attention: AttentionBatch
    ends: Ints


class BatchBuilder:
    """Builds the batch of each step from the accounts of ``manager``."""

    def __init__(self, manager: KVCacheManager, max_num_seqs: int, device: torch.device | str = "cpu") -> None:
        self._manager = manager
        self._device = torch.device(device)
        self._block_size = manager.block_size
        self._table = np.zeros((max_num_seqs, 8), dtype=np.int32)
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))

    def release(self, sequences: Iterable[Sequence]) -> None:
        """Sequences that run no more (ended or preempted) give back their rows."""
        for seq in sequences:
            if seq.table_row >= 0:
                self.free_rows.append(seq.table_row)
                seq.table_row = -1

    def build(self, plan: StepPlan) -> Batch:
        """The tensors of ``plan``. Reads the block tables; changes only this builder's own rows."""
        chunks = list(plan.chunks.values())
        rows = np.array([self._row(seq) for seq, _, _ in chunks], dtype=np.int64)
        starts = np.array([start for _, start, _ in chunks], dtype=np.int64)
        new = np.array([num_tokens for _, _, num_tokens in chunks], dtype=np.int64)
        seq_lens = starts + new
        longest = int(seq_lens.max())
        table = self._table[rows, : self._manager.blocks_needed(longest)]
        query_start = np.zeros(len(chunks) + 1, dtype=np.int32)
        np.cumsum(new, out=query_start[1:])
        if plan.num_tokens == len(chunks):
            positions, owners = starts, np.arange(len(chunks))
        else:
            owners = np.repeat(np.arange(len(chunks)), new)
            positions = np.arange(plan.num_tokens) - np.repeat(query_start[:-1], new) + np.repeat(starts, new)
        blocks, offsets = np.divmod(positions, self._block_size)
        slots = table[owners, blocks].astype(np.int64) * self._block_size + offsets
        attention = AttentionBatch(
            query_start=self._tensor(query_start),
            seq_lens=self._tensor(seq_lens.astype(np.int32)),
            block_table=self._tensor(table),
            slot_mapping=self._tensor(slots),
            positions=self._tensor(positions),
            block_size=self._block_size,
            max_query_len=int(new.max()),
            max_seq_len=longest,
        )
        return Batch(self._tensor(_token_ids(chunks)), attention, query_start[1:].astype(np.int64) - 1)

    def _row(self, seq: Sequence) -> int:
        """The row of a sequence, brought up to date."""
        if seq.table_changed or seq.table_row < 0:
            if seq.table_row < 0:
                seq.table_row = self.free_rows.pop()
            blocks = self._manager.tables[seq.id]
            if len(blocks) > self._table.shape[1]:
                self._table = np.pad(self._table, ((0, 0), (0, len(blocks) * 2 - self._table.shape[1])))
            self._table[seq.table_row, : len(blocks)] = blocks
            seq.table_changed = False
        return seq.table_row

    def _tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)


def _token_ids(chunks: list[Chunk]) -> Ints:
    ids: list[int] = []
    for seq, start, num_tokens in chunks:
        if num_tokens == 1:
            ids.append(seq.tokens[start])
        else:
            ids += seq.tokens[start : start + num_tokens]
    return np.array(ids, dtype=np.int64)
