"""From one attention call to kernel launches: grids, tiles, splits and arguments, planned before anything runs.

    one query token per sequence     decode_kernel, (sequence, KV head, split)
    anything else                    prefill_kernel, (tile of tokens, KV head, split)
    a plan of shared prefixes        shared_prefix_kernel first, then decode_kernel for each sequence's rest
    more than one part per row       merge_kernel joins them

A launch is data until ``run``: the tests compile the same launches for GPUs that are not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from pagedkv.attention.batch import AttentionBatch
from pagedkv.attention.shared_prefix import SharedPrefixes
from pagedkv.attention.tiling import (
    Gpu,
    Tiling,
    decode_tiling,
    merge_heads,
    next_power_of_two,
    num_splits,
    padded,
    prefill_tiling,
    shared_tiling,
)
from pagedkv.attention.triton_decode import decode_kernel
from pagedkv.attention.triton_merge import merge_kernel
from pagedkv.attention.triton_prefill import prefill_kernel
from pagedkv.attention.triton_shared import shared_prefix_kernel
from pagedkv.attention.triton_write import write_kv_kernel
from pagedkv.errors import InvalidRequest

WRITE_ELEMENTS = 4096  # of K that one program of write_kv takes


@dataclass(frozen=True)
class Launch:
    """One kernel over one grid, with everything it is given."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments, num_warps=self.num_warps, num_stages=self.num_stages)


@dataclass(frozen=True)
class PoolArguments:
    """The pools as the kernels take them. ``kv_format`` names how an element is read: plain, int8, fp8 or fp8_bits."""

    k_pool: torch.Tensor
    v_pool: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    kv_format: str

    @classmethod
    def of(
        cls,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        *,
        native_fp8: bool,
    ) -> PoolArguments:
        """native_fp8: the target converts e4m3 itself; otherwise its bytes are taken apart by integer arithmetic."""
        if k_pool.dtype == torch.float8_e4m3fn and not native_fp8:
            k_pool, v_pool, kv_format = k_pool.view(torch.uint8), v_pool.view(torch.uint8), "fp8_bits"
        elif k_pool.dtype == torch.float8_e4m3fn:
            kv_format = "fp8"
        elif k_pool.dtype == torch.int8:
            kv_format = "int8"
        elif k_pool.dtype in (torch.float16, torch.bfloat16, torch.float32):
            kv_format = "plain"
        else:
            raise InvalidRequest(f"a pool of {k_pool.dtype} is not one that the Triton kernels read", field="k_pool")
        return cls(k_pool, v_pool, k_scale, v_scale, kv_format)

    def arguments(self) -> dict[str, Any]:
        """By the kernels' parameter names. Without scales the pool stands in; no kernel of that format looks there."""
        k_scale = self.k_pool if self.k_scale is None else self.k_scale
        v_scale = self.v_pool if self.v_scale is None else self.v_scale
        if self.k_scale is not None and k_scale.stride() != v_scale.stride():
            raise InvalidRequest("k_scale and v_scale must have the same strides", field="k_scale")
        return {
            "k_pool": self.k_pool,
            "v_pool": self.v_pool,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "k_strides": self.k_pool.stride(),
            "v_strides": self.v_pool.stride(),
            "scale_strides": k_scale.stride()[:3],
        }


@dataclass(frozen=True)
class AttentionCall:
    """One call of paged_attention, checked by dispatch. ``splits``: in place of the number that would be chosen."""

    q: torch.Tensor
    out: torch.Tensor
    pool: PoolArguments
    batch: AttentionBatch
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    gpu: Gpu
    splits: int | None = None

    @property
    def num_kv_heads(self) -> int:
        return self.pool.k_pool.shape[1]

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.num_kv_heads

    def launches(self) -> list[Launch]:
        """What to run, in order."""
        if self.batch.max_query_len > 1:
            return self._prefill()
        shared = self.batch.plans.get(SharedPrefixes)
        return self._decode() if shared is None else self._decode_with(shared)

    def _prefill(self) -> list[Launch]:
        num_tokens = self.q.shape[0]
        tiling = prefill_tiling(*self._kind(), self.batch.max_query_len)
        num_tiles = num_tokens // (tiling.rows // self.group) + self.batch.num_seqs
        splits = self._num_splits(num_tiles, self._span(self.batch.max_seq_len, self.batch.max_query_len), tiling)
        parts = self._parts(splits)
        arguments = {
            **self._common(tiling),
            **self._result(parts),
            "seq_lens": self.batch.seq_lens,
            "num_seqs": self.batch.num_seqs,
            "num_parts": splits,
            "DIRECT": splits == 1,
        }
        grid = (num_tiles, self.num_kv_heads, splits)
        attend = Launch(prefill_kernel, grid, arguments, tiling.num_warps, tiling.num_stages)
        return [attend, *self._merge(parts, splits)]

    def _decode(self) -> list[Launch]:
        tiling = decode_tiling(*self._kind())
        splits = self._num_splits(self.batch.num_seqs, self._span(self.batch.max_seq_len), tiling)
        parts = self._parts(splits)
        launch = self._decode_launch(tiling, parts, splits, 0, splits, self.batch.seq_lens)
        return [launch, *self._merge(parts, splits)]

    def _decode_with(self, shared: SharedPrefixes) -> list[Launch]:
        num_groups = shared.group_start.shape[0] - 1
        tiling = shared_tiling(*self._kind(), self.batch.num_seqs)
        num_tiles = self.batch.num_seqs // (tiling.rows // self.group) + num_groups
        first = self._num_splits(num_tiles, shared.longest, tiling)
        own_tiling = decode_tiling(*self._kind())
        rest = self._span(self.batch.max_seq_len)
        own = self._num_splits(self.batch.num_seqs, rest, own_tiling)
        parts = self._parts(first + own)
        arguments = {
            **self._common(tiling),
            "part_acc": parts[0],
            "part_lse": parts[1],
            "seq_lens": self.batch.seq_lens,
            "shared_lens": shared.shared_lens,
            "group_start": shared.group_start,
            "members": shared.members,
            "num_groups": num_groups,
            "num_parts": first + own,
        }
        grid = (num_tiles, self.num_kv_heads, first)
        return [
            Launch(shared_prefix_kernel, grid, arguments, tiling.num_warps, tiling.num_stages),
            self._decode_launch(own_tiling, parts, own, first, first + own, shared.shared_lens),
            *self._merge(parts, first + own),
        ]

    def _decode_launch(
        self,
        tiling: Tiling,
        parts: tuple[torch.Tensor, torch.Tensor],
        splits: int,
        first_part: int,
        num_parts: int,
        shared_lens: torch.Tensor,
    ) -> Launch:
        arguments = {
            **self._common(tiling),
            **self._result(parts),
            "seq_lens": self.batch.seq_lens,
            "shared_lens": shared_lens,
            "first_part": first_part,
            "num_parts": num_parts,
            "SHARED": first_part > 0,
            "DIRECT": num_parts == 1,
        }
        grid = (self.batch.num_seqs, self.num_kv_heads, splits)
        return Launch(decode_kernel, grid, arguments, tiling.num_warps, tiling.num_stages)

    def _merge(self, parts: tuple[torch.Tensor, torch.Tensor], num_parts: int) -> list[Launch]:
        if num_parts == 1:
            return []
        num_tokens, num_heads, head_dim = self.q.shape
        wide = padded(head_dim)
        heads = merge_heads(num_tokens, num_heads, wide, self.gpu.num_multiprocessors)
        arguments = {
            **self._result(parts),
            "HEADS": heads,
            "HEAD_DIM": head_dim,
            "BLOCK_D": wide,
            "NUM_HEADS": num_heads,
            "num_parts": num_parts,
        }
        return [Launch(merge_kernel, (num_tokens, -(-num_heads // heads)), arguments, num_warps=min(4, heads))]

    def _common(self, tiling: Tiling) -> dict[str, Any]:
        """What every kernel that attends takes."""
        batch, head_dim = self.batch, self.q.shape[2]
        return {
            "q": self.q,
            "q_strides": self.q.stride(),
            "query_start": batch.query_start,
            "block_table": batch.block_table,
            "table_stride": batch.block_table.stride(0),
            **self.pool.arguments(),
            "scale": float(self.scale),
            "softcap": float(self.softcap or 0.0),
            "ROWS": tiling.rows,
            "TILE": tiling.tile,
            "GROUP": self.group,
            "HEAD_DIM": head_dim,
            "BLOCK_D": padded(head_dim),
            "BLOCK_SIZE": batch.block_size,
            "NUM_HEADS": self.q.shape[1],
            "WINDOW": self.window or 0,
            "SOFTCAP": self.softcap is not None,
            "KV_FORMAT": self.pool.kv_format,
            "COMPUTE": _compute_type(self.q.dtype),
            "PRECISION": "ieee" if self.gpu.amd else "tf32x3",  # of float32 products; others have one way only
        }

    def _result(self, parts: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
        return {
            "out": self.out,
            "out_strides": self.out.stride(),
            "part_acc": parts[0],
            "part_lse": parts[1],
            "sinks": self.out if self.sinks is None else self.sinks,
            "SINKS": self.sinks is not None,
        }

    def _parts(self, num_parts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for what the merge joins; with one part there is no merge, and nothing is written there."""
        num_tokens, num_heads, head_dim = self.q.shape if num_parts > 1 else (0, 0, 0)
        shape = (num_tokens, num_heads, num_parts)
        acc = torch.empty((*shape, head_dim), dtype=torch.float32, device=self.q.device)
        return acc, torch.empty(shape, dtype=torch.float32, device=self.q.device)

    def _kind(self) -> tuple[Gpu, int, int, int, bool]:
        """What tiles depend on."""
        return self.gpu, self.group, self.q.shape[2], self.q.element_size(), self.pool.kv_format != "plain"

    def _span(self, longest: int, query_len: int = 1) -> int:
        return longest if self.window is None else min(longest, self.window + query_len - 1)

    def _num_splits(self, num_tiles: int, span: int, tiling: Tiling) -> int:
        if self.splits is not None:
            return self.splits
        return num_splits(num_tiles * self.num_kv_heads, span, tiling.tile, self.gpu.num_multiprocessors)


def interpreted() -> bool:
    """The kernels were made for Triton's interpreter (TRITON_INTERPRET=1 at import), which runs them on the CPU."""
    return type(decode_kernel).__name__ == "InterpretedFunction"


def _compute_type(dtype: torch.dtype) -> tl.dtype:
    """What the products are made in: q's type. The interpreter's tl.dot knows no bfloat16, so there it is float32."""
    if dtype == torch.bfloat16:
        return tl.float32 if interpreted() else tl.bfloat16
    return tl.float16 if dtype == torch.float16 else tl.float32


def write_launch(k: torch.Tensor, v: torch.Tensor, pool: PoolArguments, slot_mapping: torch.Tensor) -> Launch:
    """The one launch of write_kv. fp8 is always written as bytes, so that every target rounds alike."""
    num_tokens, num_kv_heads, head_dim = k.shape
    wide = padded(head_dim)
    heads = min(next_power_of_two(num_kv_heads), max(1, WRITE_ELEMENTS // wide))
    arguments = {
        "k": k,
        "v": v,
        "k_in_strides": k.stride(),
        "v_in_strides": v.stride(),
        "slot_mapping": slot_mapping,
        **pool.arguments(),
        "HEADS": heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": wide,
        "BLOCK_SIZE": pool.k_pool.shape[2],
        "KV_FORMAT": pool.kv_format,
    }
    return Launch(write_kv_kernel, (num_tokens, -(-num_kv_heads // heads)), arguments)
