"""Random paged batches for kernel tests, hostile where a kernel must not look, and their answer in float64.

Every slot that belongs to no sequence is NaN (or has a NaN scale), tables are scrambled over the pool and wider than
needed, and the entries past a sequence's used blocks are garbage ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagedkv.attention.batch import AttentionBatch
from pagedkv.attention.dispatch import paged_attention, write_kv

GARBAGE = (-1, 2**31 - 1, -(2**31), 10**6)


@dataclass(frozen=True)
class PagedCase:
    """The arguments of one call. ``tables``: what the sequences really own."""

    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    batch: AttentionBatch
    tables: list[list[int]]

    def attend(self, backend: Any, **features: Any) -> torch.Tensor:
        """The backend's answer, into an output that was NaN."""
        out = torch.full_like(self.q, float("nan"))
        scale = features.pop("scale", self.q.shape[-1] ** -0.5)
        return paged_attention(self.q, self.k_pool, self.v_pool, self.batch, scale=scale, k_scale=self.k_scale,
                               v_scale=self.v_scale, backend=backend, out=out, **features)  # fmt: skip

    def expected(self, **features: Any) -> torch.Tensor:
        """The reference's answer in float64."""
        exact = dataclasses.replace(self, q=self.q.double())
        return exact.attend("reference", **features)

    def error(self, backend: Any, **features: Any) -> float:
        """Largest difference from the reference; NaN where the backend left or made one."""
        return (self.attend(backend, **features).double() - self.expected(**features)).abs().max().item()


def paged_case(
    seq_lens: Sequence[int],
    query_lens: Sequence[int] | None = None,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    pool_dtype: torch.dtype | None = None,
    shared: int = 0,
    seed: int = 0,
) -> PagedCase:
    """query_lens: one token each if left out. shared: leading blocks that all sequences have in common."""
    random = torch.Generator().manual_seed(seed)
    query_lens = [min(1, length) for length in seq_lens] if query_lens is None else query_lens
    used = [-(-length // block_size) for length in seq_lens]
    num_blocks = shared + sum(used) + 3
    ids = torch.randperm(num_blocks, generator=random).tolist()
    common, ids = ids[:shared], ids[shared:]
    tables = []
    for count in used:
        own = max(0, count - shared)
        tables.append([*common[:count], *ids[:own]])
        ids = ids[own:]
    batch = AttentionBatch.build(tables, seq_lens, query_lens, block_size)
    width = max(used, default=0) + 2
    table = torch.tensor([[*row, *(GARBAGE * width)][:width] for row in tables], dtype=torch.int32)
    batch = dataclasses.replace(batch, block_table=table)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    pool_dtype = pool_dtype or dtype
    shape = (num_blocks, 2, kv_heads, block_size, head_dim)
    data = torch.full(shape, float("nan")).to(pool_dtype) if pool_dtype.is_floating_point else torch.full(shape, -128)
    data = data.to(pool_dtype)
    quantised = pool_dtype in (torch.int8, torch.float8_e4m3fn)
    scales = torch.full(shape[:-1], float("nan")) if quantised else None
    k_scale, v_scale = (None, None) if scales is None else (scales[:, 0], scales[:, 1])
    slots = sorted({t[p // block_size] * block_size + p % block_size
                    for t, length in zip(tables, seq_lens, strict=True) for p in range(length)})  # fmt: skip
    k, v = randn(len(slots), kv_heads, head_dim), randn(len(slots), kv_heads, head_dim)
    write_kv(k, v, data[:, 0], data[:, 1], torch.tensor(slots, dtype=torch.int64), k_scale=k_scale, v_scale=v_scale,
             backend="reference")  # fmt: skip
    q = randn(sum(query_lens), heads, head_dim)
    return PagedCase(q, data[:, 0], data[:, 1], k_scale, v_scale, batch, tables)
