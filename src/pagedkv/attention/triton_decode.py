"""Decode on a GPU: one query token per sequence, all query heads of a KV head as one tile.

One program per (sequence, KV head, split of the history): K and V are read once per KV head, whatever the group, and
a long history is shared between programs. The length of a split comes from the sequence's own length on the device,
so a CUDA graph captured with short sequences is right for long ones. Cost: each K and V byte of the batch is read
once; with more than one split, (splits * Hq * D * 4) bytes more per token are written and read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedkv.attention.triton_merge import finish
from pagedkv.attention.triton_tile import attend


@triton.jit
def split_range(start, stop, split, num_splits, TILE: tl.constexpr):
    """The part of [start, stop) that is number ``split`` of ``num_splits``: whole tiles, or nothing at the end."""
    length = tl.cdiv(tl.cdiv(tl.maximum(stop - start, 0), num_splits), TILE) * TILE
    first = start + split * length
    return tl.minimum(first, stop), tl.minimum(first + length, stop)


@triton.jit(do_not_specialize=["table_stride", "first_part", "num_parts"])  # they change from step to step
def decode_kernel(
    out,
    out_strides,
    part_acc,
    part_lse,
    q,
    q_strides,
    query_start,
    seq_lens,
    shared_lens,
    block_table,
    table_stride,
    k_pool,
    v_pool,
    k_scale,
    v_scale,
    k_strides,
    v_strides,
    scale_strides,
    first_part,
    num_parts,
    sinks,
    scale,
    softcap,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    DIRECT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (B, Hkv, splits). ROWS is GROUP rounded up to what a matrix unit takes, or 1.

    shared_lens [B] int32 (read if SHARED): leading positions that the shared-prefix launch has taken.
    """
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(query_start + seq)
    if tl.load(query_start + seq + 1) == token:  # a sequence without a query in this step
        return
    length = tl.load(seq_lens + seq)
    start = tl.zeros_like(length)
    if SHARED:
        start += tl.load(shared_lens + seq)
    if WINDOW > 0:
        start = tl.maximum(start, length - WINDOW)
    start, stop = split_range(tl.minimum(start, length), length, split, tl.num_programs(2), TILE)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    counts = rows < GROUP
    heads = kv_head * GROUP + rows
    tokens = tl.zeros([ROWS], tl.int32) + token
    at = (tokens.to(tl.int64) * q_strides[0] + heads * q_strides[1])[:, None] + (dims * q_strides[2])[None, :]
    queries = tl.load(q + at, mask=counts[:, None] & (dims < HEAD_DIM)[None, :], other=0.0).to(COMPUTE)
    ends = tl.zeros([ROWS], tl.int32) + stop

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    table = block_table + seq.to(tl.int64) * table_stride
    peak, total, acc = attend(
        queries, peak, total, acc, ends, ends, start, stop, table, kv_head,
        k_pool, v_pool, k_scale, v_scale, k_strides, v_strides, scale_strides, scale, softcap,
        ROWS, TILE, HEAD_DIM, BLOCK_D, BLOCK_SIZE, False, SOFTCAP, KV_FORMAT, PRECISION, MASKED=True,
    )  # fmt: skip
    finish(
        peak, total, acc, tokens, heads, counts, out, out_strides, part_acc, part_lse, first_part + split, num_parts,
        sinks, HEAD_DIM, BLOCK_D, NUM_HEADS, DIRECT, SINKS,
    )  # fmt: skip
