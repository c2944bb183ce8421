"""Prefill and mixed batches on a GPU: tiles of query tokens of one sequence, causal to its history and to themselves.

One launch serves any mix of decodes (one query token), chunks with history and whole prompts: the grid has room for
every sequence's last, unfilled tile, and a program finds its sequence by bisecting ``query_start`` on the device, so
nothing is read back. A tile holds ``tokens x GROUP`` rows: all query heads of a KV head share each K and V tile.
The new tokens' K and V are in the pool already (write_kv comes first), so history and new tokens are one range.
(One launch for ragged batches by bisection: the idea is vLLM's unified Triton attention, IBM Research 2025.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedkv.attention.triton_decode import split_range
from pagedkv.attention.triton_merge import finish
from pagedkv.attention.triton_tile import attend


@triton.jit
def find_tile(starts, num_items, tile, TOKENS: tl.constexpr):
    """(item, tile within the item) of tile number ``tile``, where item i may begin at tile starts[i] // TOKENS + i.

    starts [num_items + 1] int32, rising. Every item gets its whole tiles and one more, so no count is read back;
    a tile past its item's tokens has nothing to do.
    """
    low = tl.zeros_like(tile)
    high = low + num_items
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low, tile - (tl.load(starts + low) // TOKENS + low)


@triton.jit(do_not_specialize=["num_seqs", "table_stride", "num_parts"])  # they change from step to step
def prefill_kernel(
    out,
    out_strides,
    part_acc,
    part_lse,
    q,
    q_strides,
    query_start,
    seq_lens,
    num_seqs,
    block_table,
    table_stride,
    k_pool,
    v_pool,
    k_scale,
    v_scale,
    k_strides,
    v_strides,
    scale_strides,
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
    DIRECT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (T // TOKENS + B, Hkv, splits) with TOKENS = ROWS // GROUP query tokens to a tile."""
    TOKENS: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq, tile = find_tile(query_start, num_seqs, tl.num_programs(0) - 1 - tl.program_id(0), TOKENS)  # longest first
    first_token = tl.load(query_start + seq)
    num_new = tl.load(query_start + seq + 1) - first_token
    if tile * TOKENS >= num_new:
        return
    length = tl.load(seq_lens + seq)
    history = length - num_new

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    index = tile * TOKENS + rows // GROUP  # of the row's token among the sequence's new ones
    counts = (rows < TOKENS * GROUP) & (index < num_new)
    tokens = first_token + index
    heads = kv_head * GROUP + rows % GROUP
    at = (tokens.to(tl.int64) * q_strides[0] + heads * q_strides[1])[:, None] + (dims * q_strides[2])[None, :]
    queries = tl.load(q + at, mask=counts[:, None] & (dims < HEAD_DIM)[None, :], other=0.0).to(COMPUTE)
    ends = tl.where(counts, history + index + 1, 0)

    start = tl.zeros_like(length)
    if WINDOW > 0:
        start = tl.maximum(start, history + tile * TOKENS + 1 - WINDOW)
    stop = history + tl.minimum(tile * TOKENS + TOKENS, num_new)
    start, stop = split_range(start, stop, split, tl.num_programs(2), TILE)
    begins = ends - WINDOW
    ends = tl.minimum(ends, stop)

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    table = block_table + seq.to(tl.int64) * table_stride
    seen_by_all = start
    if WINDOW == 0:  # whole tiles below the first row's own position need no mask
        seen_by_all += tl.maximum(tl.minimum(history + tile * TOKENS + 1, stop) - start, 0) // TILE * TILE
        peak, total, acc = attend(
            queries, peak, total, acc, begins, ends, start, seen_by_all, table, kv_head,
            k_pool, v_pool, k_scale, v_scale, k_strides, v_strides, scale_strides, scale, softcap,
            ROWS, TILE, HEAD_DIM, BLOCK_D, BLOCK_SIZE, WINDOW > 0, SOFTCAP, KV_FORMAT, PRECISION, MASKED=False,
        )  # fmt: skip
    peak, total, acc = attend(
        queries, peak, total, acc, begins, ends, seen_by_all, stop, table, kv_head,
        k_pool, v_pool, k_scale, v_scale, k_strides, v_strides, scale_strides, scale, softcap,
        ROWS, TILE, HEAD_DIM, BLOCK_D, BLOCK_SIZE, WINDOW > 0, SOFTCAP, KV_FORMAT, PRECISION, MASKED=True,
    )  # fmt: skip
    finish(
        peak, total, acc, tokens, heads, counts, out, out_strides, part_acc, part_lse, split, num_parts,
        sinks, HEAD_DIM, BLOCK_D, NUM_HEADS, DIRECT, SINKS,
    )  # fmt: skip
