"""Gather and softmax in plain torch, on any device: the oracle that every other backend is compared with.

It gathers each sequence's history into a contiguous copy, which is what the kernels exist to avoid. It computes in
float32 (float64 for float64 inputs). It is not exact across batches: torch's products round differently for
different numbers of rows.
"""

from __future__ import annotations

import torch

from pagedkv.attention.batch import AttentionBatch
from pagedkv.errors import InvalidRequest

_MAX_SCORES = 1 << 25  # elements of a score matrix that are alive at once


class ReferenceAttention:
    """See ``dispatch.paged_attention`` and ``dispatch.write_kv`` for shapes and errors."""

    name = "reference"
    exact = False

    def paged_attention(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.empty_like(q) if out is None else out
        kind = torch.float64 if q.dtype == torch.float64 else torch.float32
        starts, lengths = batch.query_start.tolist(), batch.seq_lens.tolist()
        for row, length in enumerate(lengths):
            first, last = starts[row], starts[row + 1]
            if first == last:
                continue
            blocks = batch.block_table[row, : -(-length // batch.block_size)]
            k = gather(k_pool, blocks, length, k_scale).to(kind)
            v = gather(v_pool, blocks, length, v_scale).to(kind)
            step = max(1, _MAX_SCORES // max(1, q.shape[1] * length))
            for begin in range(first, last, step):
                end = min(begin + step, last)
                positions = torch.arange(length - (last - begin), length - (last - end), device=q.device)
                rows = attend(q[begin:end].to(kind), k, v, positions, scale, window, softcap, sinks)
                out[begin:end] = rows.to(out.dtype)
        return out

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        num_blocks, _, block_size, _ = k_pool.shape
        kept = slot_mapping >= 0
        slots = slot_mapping[kept].long()
        if slots.numel() and int(slots.max()) >= num_blocks * block_size:
            raise InvalidRequest(
                f"slot {int(slots.max())} lies outside a pool of {num_blocks} blocks of {block_size}",
                field="slot_mapping",
            )
        blocks, offsets = slots // block_size, slots % block_size
        for values, pool, scales in ((k, k_pool, k_scale), (v, v_pool, v_scale)):
            stored, scale = quantise(values[kept], pool.dtype)
            pool[blocks, :, offsets] = stored
            if scales is not None and scale is not None:
                scales[blocks, :, offsets] = scale


def gather(pool: torch.Tensor, blocks: torch.Tensor, length: int, scales: torch.Tensor | None = None) -> torch.Tensor:
    """The first ``length`` positions of a table as [Hkv, length, D], dequantised. Copies; never reads past them."""
    kv_heads, head_dim = pool.shape[1], pool.shape[3]
    picked = pool[blocks.long()].transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, :length]
    if scales is None:
        return picked
    factors = scales[blocks.long()].transpose(0, 1).reshape(kv_heads, -1, 1)[:, :length]
    return picked.float() * factors


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q [n, Hq, D] at ``positions`` [n] over k, v [Hkv, length, D] -> [n, Hq, D]."""
    (rows, heads, head_dim), (kv_heads, length, _) = q.shape, k.shape
    if length == 0:
        return torch.zeros_like(q)
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    scores = (grouped @ k[:, None].transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    slots = torch.arange(length, device=q.device)
    seen = slots <= positions[:, None]
    if window is not None:
        seen &= slots > positions[:, None] - window
    scores = scores.masked_fill(~seen, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.to(scores.dtype).reshape(kv_heads, heads // kv_heads, 1, 1)
        top = torch.maximum(top, sink)
    top = top.masked_fill(top == float("-inf"), 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - top)
    # a row that sees nothing has weights 0 and, without sinks, total 0: it gives zeros, not 0 / 0
    weights = weights / total.masked_fill(total == 0, 1.0)
    return (weights @ v[:, None]).permute(2, 0, 1, 3).reshape(rows, heads, head_dim)


def quantise(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values [..., D] as the pool stores them, and their scales [...] for int8 and fp8 (None otherwise).

    One scale per row: its largest magnitude becomes 127 (int8) or 448 (fp8_e4m3). Infinities saturate to 3.4e38; a
    NaN gives a NaN scale, so that it is not hidden. A row of zeros has scale 0.
    """
    limits = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
    if dtype not in limits:
        return values.to(dtype), None
    limit, largest = limits[dtype], 3.4e38
    values = values.float().clamp(-largest, largest)
    top = values.abs().amax(-1)
    factor = torch.where(top > 0, top.new_tensor(limit) / top, 0.0)  # a plain float would become limit * (1 / top)
    # a subnormal row would need a factor beyond float32: it is stored as zeros
    factor = factor.masked_fill(factor == float("inf"), 0.0)
    scaled = (values * factor[..., None]).nan_to_num(0.0).clamp(-limit, limit)
    stored = scaled.round() if dtype == torch.int8 else scaled
    return stored.to(dtype), top / limit
