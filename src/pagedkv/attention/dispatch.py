"""The two calls of this package: attention through the block table, and the write of new KV into the pool.

T new tokens, Hq query heads, Hkv KV heads (Hq a multiple of Hkv), D head dimension, N blocks of b slots.
Everything that a caller can get wrong about shapes is checked here, once, for every backend.
"""

from __future__ import annotations

import torch

from pagedkv.attention.backend import AttentionBackend, choose
from pagedkv.attention.batch import AttentionBatch
from pagedkv.errors import InvalidRequest

QUANTISED = (torch.int8, torch.float8_e4m3fn)


def paged_attention(
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
    backend: str | AttentionBackend = "auto",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale * q k) v over each token's own history and itself, read through the block table.

    q               [T, Hq, D]      query head h reads KV head h // (Hq / Hkv)
    k_pool, v_pool  [N, Hkv, b, D]  any strides; never copied. Their new KV must have been written before.
    batch           which rows belong to which sequence, and where its history lies
    window          a query at position p sees p - window + 1 .. p
    softcap         scores become softcap * tanh(score / softcap)
    sinks           [Hq] an extra logit per head that takes part in the denominator only
    k_scale, v_scale  float32 [N, Hkv, b] for int8 and fp8 pools: value = stored * scale
    out             [T, Hq, D] to write into; made in q's dtype if left out

    Slots past a sequence's length are never read. A row with nothing to attend to gives zeros.
    Raises InvalidRequest for shapes that do not fit, BackendUnavailable for a backend that is not here.
    """
    _check_pools(k_pool, v_pool, k_scale, v_scale, batch.block_size)
    _check_query(q, k_pool, batch, window, softcap, sinks)
    if out is not None and out.shape != q.shape:
        raise InvalidRequest(f"out is {list(out.shape)}; it must be q's {list(q.shape)}", field="out")
    chosen = choose(backend, q.device) if isinstance(backend, str) else backend
    return chosen.paged_attention(
        q,
        k_pool,
        v_pool,
        batch,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        out=out,
    )


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    backend: str | AttentionBackend = "auto",
) -> None:
    """Put token t's k[t], v[t] [Hkv, D] into slot ``slot_mapping[t]`` of the pools, converted; slot -1 is skipped.

    For int8 and fp8 pools each (token, head) gets a scale of its own, written to k_scale and v_scale [N, Hkv, b]:
    the largest magnitude maps to the format's largest value, so nothing is clipped.
    Raises InvalidRequest for shapes that do not fit or a slot outside the pool.
    """
    _check_pools(k_pool, v_pool, k_scale, v_scale, k_pool.shape[2])
    want = (slot_mapping.shape[0], k_pool.shape[1], k_pool.shape[3])
    for name, tensor in (("k", k), ("v", v)):
        if tuple(tensor.shape) != want:
            raise InvalidRequest(f"{name} is {list(tensor.shape)}; slots and pool ask for {list(want)}", field=name)
    chosen = choose(backend, k.device) if isinstance(backend, str) else backend
    chosen.write_kv(k, v, k_pool, v_pool, slot_mapping, k_scale=k_scale, v_scale=v_scale)


def _check_pools(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    block_size: int,
) -> None:
    if k_pool.dim() != 4 or k_pool.shape != v_pool.shape or k_pool.dtype != v_pool.dtype:
        raise InvalidRequest(
            f"k_pool {list(k_pool.shape)} {k_pool.dtype} and v_pool {list(v_pool.shape)} {v_pool.dtype} must be "
            "alike: [num_blocks, num_kv_heads, block_size, head_dim]",
            field="k_pool",
        )
    if k_pool.shape[2] != block_size:
        raise InvalidRequest(f"the pool has blocks of {k_pool.shape[2]}, the batch of {block_size}", field="block_size")
    if (k_pool.dtype in QUANTISED) != (k_scale is not None) or (k_scale is None) != (v_scale is None):
        raise InvalidRequest(
            f"k_scale and v_scale go with int8 and fp8 pools; this one is {k_pool.dtype}", field="k_scale"
        )
    for name, scales in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scales is not None and (scales.shape != k_pool.shape[:3] or scales.dtype != torch.float32):
            raise InvalidRequest(
                f"{name} is {list(scales.shape)} {scales.dtype}; it must be {list(k_pool.shape[:3])} float32",
                field=name,
            )


def _check_query(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    batch: AttentionBatch,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    heads, kv_heads = (q.shape[1] if q.dim() == 3 else 0), k_pool.shape[1]
    if q.dim() != 3 or q.shape[2] != k_pool.shape[3] or heads % kv_heads:
        raise InvalidRequest(
            f"q is {list(q.shape)}; for this pool it must be [T, a multiple of {kv_heads}, {k_pool.shape[3]}]",
            field="q",
        )
    if q.shape[0] != batch.num_tokens:
        raise InvalidRequest(f"q has {q.shape[0]} rows, the batch {batch.num_tokens} tokens", field="q")
    if batch.max_seq_len > batch.block_table.shape[1] * batch.block_size:
        raise InvalidRequest(
            f"a sequence of {batch.max_seq_len} tokens does not fit a table of {batch.block_table.shape[1]} blocks of "
            f"{batch.block_size}",
            field="seq_lens",
        )
    if window is not None and window < 1:
        raise InvalidRequest(f"window is {window}; it must be at least 1", field="window")
    if softcap is not None and not softcap > 0:
        raise InvalidRequest(f"softcap is {softcap}; it must be above 0", field="softcap")
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise InvalidRequest(f"sinks is {list(sinks.shape)}; it must be [{heads}]", field="sinks")
