"""What one forward pass attends to, as plain tensors: the meeting point of the engine and every attention backend.

Owns no memory of the pool and knows no cache: a block table here is numbers. One batch serves prefill, chunks of
prefill, decode and any mixture, because a sequence is described by two numbers only: how many tokens it has with the
new ones (``seq_lens``) and how many of those are new (``query_start``).

    sequence i:   |<------------------ seq_lens[i] ------------------>|
                  |  history, already in the pool  |  new tokens       |
                                                   |<- query_lens[i] ->|   rows query_start[i] .. query_start[i+1]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pagedkv.errors import InvalidRequest


@dataclass(frozen=True)
class AttentionBatch:
    """The sequences of one forward pass. B sequences, T new tokens in all, W the widest table.

    query_start:   int32 [B + 1]  rows of sequence i are query_start[i] .. query_start[i + 1]
    seq_lens:      int32 [B]      tokens of sequence i, history and new
    block_table:   int32 [B, W]   physical block of logical block j; entries past the used part may hold anything
    slot_mapping:  int64 [T]      block * block_size + offset where token t's KV goes; -1: nowhere
    positions:     int64 [T]      position of token t in its sequence
    block_size:    tokens in a block
    max_query_len, max_seq_len    host integers, so that no kernel launch waits for the device

    ``plans`` is where a backend keeps what it derives from the batch once and uses in every layer.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    block_size: int
    max_query_len: int
    max_seq_len: int
    plans: dict[Any, Any] = field(init=False, default_factory=dict, repr=False, compare=False)

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.slot_mapping.shape[0]

    @property
    def device(self) -> torch.device:
        return self.block_table.device

    @classmethod
    def build(
        cls,
        tables: Sequence[Sequence[int]],
        seq_lens: Sequence[int],
        query_lens: Sequence[int],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> AttentionBatch:
        """Make the tensors from host lists.

        tables[i] must cover seq_lens[i] positions (more is allowed), and query_lens[i] <= seq_lens[i].
        Raises InvalidRequest that names the sequence and both numbers otherwise.
        """
        _check(tables, seq_lens, query_lens, block_size)
        width = max((len(table) for table in tables), default=0)
        block_table = torch.zeros((len(tables), max(width, 1)), dtype=torch.int32)
        starts, positions, slots = [0], [], []
        for row, (table, length, new) in enumerate(zip(tables, seq_lens, query_lens, strict=True)):
            if len(table):
                block_table[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
            starts.append(starts[-1] + new)
            for position in range(length - new, length):
                positions.append(position)
                slots.append(table[position // block_size] * block_size + position % block_size)
        return cls(
            query_start=torch.tensor(starts, dtype=torch.int32).to(device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32).to(device),
            block_table=block_table.to(device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64).to(device),
            positions=torch.tensor(positions, dtype=torch.int64).to(device),
            block_size=block_size,
            max_query_len=max(query_lens, default=0),
            max_seq_len=max(seq_lens, default=0),
        )


def _check(
    tables: Sequence[Sequence[int]], seq_lens: Sequence[int], query_lens: Sequence[int], block_size: int
) -> None:
    if block_size < 1:
        raise InvalidRequest(f"block_size is {block_size}; it must be at least 1", field="block_size")
    if not len(tables) == len(seq_lens) == len(query_lens):
        raise InvalidRequest(
            f"{len(tables)} tables, {len(seq_lens)} seq_lens and {len(query_lens)} query_lens: one each per sequence",
            field="tables",
        )
    for row, (table, length, new) in enumerate(zip(tables, seq_lens, query_lens, strict=True)):
        if not 0 <= new <= length:
            raise InvalidRequest(f"sequence {row}: query_len {new} is not within 0..{length}", field="query_lens")
        if length > len(table) * block_size:
            raise InvalidRequest(
                f"sequence {row}: {length} tokens, but {len(table)} blocks hold {len(table) * block_size}",
                field="seq_lens",
            )
