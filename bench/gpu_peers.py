"""What bench/gpu.py times beside our kernels: torch's SDPA, and FlashInfer and vLLM where they can be imported.

Each function gives lists of calls by peer, made for the same queries and the same K and V: SDPA on contiguous copies,
the others through the same block tables. A peer that is not installed is left out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F

Call = Callable[[], Any]


class Pools(Protocol):
    """K and V [num_blocks, num_kv_heads, block_size, head_dim], of one layer."""

    k: torch.Tensor
    v: torch.Tensor


MOST_CONTIGUOUS = 10 << 30  # bytes of copies for SDPA; larger shapes are left out


def _contiguous(pool: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """[B, num_kv_heads, context, head_dim] of the blocks of table [B, W]."""
    picked = pool[table.long()]  # [B, W, Hkv, b, D]
    return picked.permute(0, 2, 1, 3, 4).flatten(2, 3).contiguous()


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def decode(pool: Pools, queries: list[torch.Tensor], tables: list[torch.Tensor], context: int) -> dict[str, list[Call]]:
    """queries [B, Hq, D] and tables [B, W] of each turn."""
    peers: dict[str, list[Call]] = {}
    num_bytes = len(tables) * tables[0].numel() * pool.k[0].numel() * 2 * pool.k.element_size()
    if num_bytes <= MOST_CONTIGUOUS:
        peers["sdpa"] = [
            _sdpa(q[:, :, None], _contiguous(pool.k, table), _contiguous(pool.v, table), False)
            for q, table in zip(queries, tables, strict=True)
        ]
    if importlib.util.find_spec("flashinfer"):
        peers["flashinfer"] = [_flashinfer(pool, q, t, context) for q, t in zip(queries, tables, strict=True)]
    if importlib.util.find_spec("vllm"):
        peers["vllm"] = [_vllm(pool, q, t, context, 1) for q, t in zip(queries, tables, strict=True)]
    return peers


def prefill(pool: Pools, q: torch.Tensor, table: torch.Tensor, history: int) -> dict[str, list[Call]]:
    """q [T, Hq, D] of one sequence with ``history`` positions before it, table [1, W]."""
    peers: dict[str, list[Call]] = {}
    if not history:  # SDPA's causal mask begins at the first key
        k, v = (_contiguous(part, table)[:, :, : len(q)] for part in (pool.k, pool.v))
        peers["sdpa"] = [_sdpa(q.transpose(0, 1)[None].contiguous(), k.contiguous(), v.contiguous(), True)]
    if importlib.util.find_spec("vllm"):
        peers["vllm"] = [_vllm(pool, q, table, history + len(q), len(q))]
    return peers


def _flashinfer(pool: Pools, q: torch.Tensor, table: torch.Tensor, context: int) -> Call:
    """Its paged decode, which reads the same [blocks, heads, slots, dims] order ("HND")."""
    import flashinfer

    num_seqs, width = table.shape
    block_size = pool.k.shape[2]
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    starts = torch.arange(0, num_seqs * width + 1, width, dtype=torch.int32, device=q.device)
    last = torch.full((num_seqs,), (context - 1) % block_size + 1, dtype=torch.int32, device=q.device)
    wrapper.plan(
        starts, table.flatten(), last, q.shape[1], pool.k.shape[1], q.shape[2], block_size, q_data_type=q.dtype
    )
    return lambda: wrapper.run(q, (pool.k, pool.v))


def _vllm(pool: Pools, q: torch.Tensor, table: torch.Tensor, context: int, query_len: int) -> Call:
    """Its FlashAttention over a block table, on a pool in its own [blocks, slots, heads, dims] order."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    k, v = (part.transpose(1, 2).contiguous() for part in (pool.k, pool.v))
    num_seqs = table.shape[0]
    starts = torch.arange(0, (num_seqs + 1) * query_len, query_len, dtype=torch.int32, device=q.device)
    lengths = torch.full((num_seqs,), context, dtype=torch.int32, device=q.device)
    return lambda: flash_attn_varlen_func(q, k, v, max_seqlen_q=query_len, cu_seqlens_q=starts, max_seqlen_k=context,
                                          seqused_k=lengths, block_table=table, causal=True)  # fmt: skip
