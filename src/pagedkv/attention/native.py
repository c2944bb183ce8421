"""The CPU kernels of csrc/attention*.cpp behind the backend's call.

Exact: decode, prefill, chunks and shared prefixes give the same bits for a token, at any number of threads, per
instruction set (csrc/attention.hpp has the order of reduction). Runs on torch's own OpenMP pool.
"""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType
from typing import Any

import torch  # before the extension: its OpenMP symbols resolve to the runtime that torch has loaded

from pagedkv.attention.batch import AttentionBatch
from pagedkv.errors import BackendUnavailable, InvalidRequest

ROW_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
POOL_TYPES = {**ROW_TYPES, torch.int8: 3, torch.float8_e4m3fn: 4}


@cache
def extension() -> ModuleType:
    """The compiled module. Raises BackendUnavailable where it was not built, or PAGEDKV_NATIVE=0 rules it out."""
    if os.environ.get("PAGEDKV_NATIVE") == "0":
        raise BackendUnavailable("the native kernels are switched off (PAGEDKV_NATIVE=0)")
    try:
        from pagedkv import _native
    except ImportError as error:
        raise BackendUnavailable(f"the native extension is not installed ({error})") from error
    return _native  # type: ignore[no-any-return]


class NativeAttention:
    """See ``dispatch.paged_attention`` and ``dispatch.write_kv`` for shapes.

    Beyond what they ask for: q and out float32, bfloat16 or float16; head_dim 1 to 256; the last dimension of every
    tensor dense. Raises InvalidRequest otherwise, and for a block id in use that lies outside the pool.
    """

    name = "native"
    exact = True

    def __init__(self) -> None:
        self._native = extension()

    @property
    def instruction_set(self) -> str:
        return str(self._native.instruction_set())

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
        out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        plan = self.plan(batch, q.shape[1], k_pool, window)
        sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
        self._native.attention(
            plan,
            _rows("q", q),
            _rows("out", out),
            _pool("k_pool", k_pool, k_scale),
            _pool("v_pool", v_pool, v_scale),
            POOL_TYPES[k_pool.dtype],
            scale,
            softcap or 0.0,
            0 if sinks is None else sinks.data_ptr(),
        )
        return out

    def plan(self, batch: AttentionBatch, num_heads: int, k_pool: torch.Tensor, window: int | None) -> Any:
        """The division of a batch into work, made once and kept with the batch for the layers that follow."""
        num_blocks, num_kv_heads, block_size, head_dim = k_pool.shape
        threads = torch.get_num_threads()
        key = ("native", num_heads, num_kv_heads, head_dim, num_blocks, window, threads)
        plan = batch.plans.get(key)
        if plan is None:
            starts, lengths, table = batch.query_start, batch.seq_lens, batch.block_table
            for name, tensor in (("query_start", starts), ("seq_lens", lengths), ("block_table", table)):
                if tensor.dtype != torch.int32 or not tensor.is_contiguous():
                    raise InvalidRequest(f"{name} must be contiguous int32, not {tensor.dtype}", field=name)
            plan = self._native.AttentionPlan()
            try:
                plan.build(
                    (starts.data_ptr(), lengths.data_ptr(), table.data_ptr()),
                    (
                        batch.num_seqs,
                        table.shape[1],
                        block_size,
                        num_blocks,
                        num_heads,
                        num_kv_heads,
                        head_dim,
                        window or 0,
                    ),
                )
            except ValueError as error:
                raise InvalidRequest(str(error), field="batch") from error
            batch.plans[key] = plan
        return plan

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
        num_blocks, num_kv_heads, block_size, head_dim = k_pool.shape
        if head_dim > self._native.max_head_dim:
            raise InvalidRequest(
                f"head_dim is {head_dim}; the kernels take 1 to {self._native.max_head_dim}", field="k"
            )
        slots = slot_mapping.to(torch.int64).contiguous()
        sizes = (slots.data_ptr(), slots.shape[0], num_blocks, block_size, num_kv_heads, head_dim)
        try:
            self._native.write_kv(
                _rows("k", k),
                _rows("v", v),
                _pool("k_pool", k_pool, k_scale),
                _pool("v_pool", v_pool, v_scale),
                POOL_TYPES[k_pool.dtype],
                sizes,
            )
        except ValueError as error:
            raise InvalidRequest(str(error), field="slot_mapping") from error


def _rows(name: str, tensor: torch.Tensor) -> tuple[int, int, int, int]:
    kind = ROW_TYPES.get(tensor.dtype)
    token, head, dim = tensor.stride()
    if kind is None or (dim != 1 and tensor.shape[2] > 1) or tensor.device.type != "cpu":
        raise InvalidRequest(
            f"{name} must be a float32, bfloat16 or float16 CPU tensor with a dense last dimension, not {tensor.dtype} "
            f"on {tensor.device} with strides {tensor.stride()}",
            field=name,
        )
    return tensor.data_ptr(), kind, token, head


def _pool(name: str, pool: torch.Tensor, scales: torch.Tensor | None) -> tuple[int, ...]:
    block, head, slot, dim = pool.stride()
    if pool.dtype not in POOL_TYPES or (dim != 1 and pool.shape[3] > 1) or pool.device.type != "cpu":
        raise InvalidRequest(
            f"{name} must be a float32, float16, bfloat16, int8 or float8_e4m3fn CPU tensor with a dense last "
            f"dimension, not {pool.dtype} on {pool.device} with strides {pool.stride()}",
            field=name,
        )
    if scales is None:
        return pool.data_ptr(), block, head, slot, 0, 0, 0, 0
    return pool.data_ptr(), block, head, slot, scales.data_ptr(), *scales.stride()
