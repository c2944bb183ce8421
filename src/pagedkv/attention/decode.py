"""The chapter's own call: one new query per sequence, block tables and lengths as they are."""

from __future__ import annotations

import torch

from pagedkv.attention.batch import AttentionBatch
from pagedkv.attention.dispatch import paged_attention
from pagedkv.errors import InvalidRequest


def paged_decode_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    block_size: int,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """softmax(q k / sqrt(D)) v over the first ``lengths[b]`` positions of each table.

    q [B, Hq, D], pools [N, Hkv, block_size, D], block_tables int [B, W], lengths int [B] -> [B, Hq, D].
    Query head h reads KV head h // (Hq / Hkv). Table entries past the used part may hold anything. A length of 0 gives
    zeros. Raises InvalidRequest when a length is negative or exceeds W * block_size.
    """
    if q.dim() != 3 or block_tables.dim() != 2 or block_tables.shape[0] != q.shape[0] or lengths.shape != q.shape[:1]:
        raise InvalidRequest(
            f"q {list(q.shape)}, block_tables {list(block_tables.shape)} and lengths {list(lengths.shape)} must be "
            "[B, Hq, D], [B, W] and [B]",
            field="q",
        )
    rows, width = block_tables.shape
    longest, shortest = (int(lengths.max()), int(lengths.min())) if rows else (0, 0)
    if shortest < 0 or longest > width * block_size:
        raise InvalidRequest(
            f"lengths reach from {shortest} to {longest}; a table of {width} blocks of {block_size} holds 0 to "
            f"{width * block_size}",
            field="lengths",
        )
    batch = AttentionBatch(
        query_start=torch.arange(rows + 1, dtype=torch.int32, device=q.device),
        seq_lens=lengths.to(torch.int32),
        block_table=block_tables.to(torch.int32),
        slot_mapping=torch.full((rows,), -1, dtype=torch.int64, device=q.device),
        positions=lengths.to(torch.int64) - 1,
        block_size=block_size,
        max_query_len=1,
        max_seq_len=longest,
    )
    return paged_attention(q, k_pool, v_pool, batch, scale=q.shape[-1] ** -0.5, backend=backend)
