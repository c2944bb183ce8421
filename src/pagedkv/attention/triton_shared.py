"""Shared prefixes on a GPU: the leading blocks that several sequences have in common are read once for all of them.

The batch is cut into groups (shared_prefix.py finds them and says when it pays). One program takes a tile of a
group's members, all query heads of a KV head, against a split of the group's shared positions, read through the first
member's table. It fills the first parts of every member; the decode kernel then takes each sequence's own rest into
the parts that follow, and the merge joins them. A sequence that shares nothing is a group of one with length 0, whose
parts say "nothing seen". (Cascade attention: Ye et al. 2024, FlashInfer; Hydragen: Juravsky et al. 2024.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedkv.attention.triton_decode import split_range
from pagedkv.attention.triton_merge import finish
from pagedkv.attention.triton_prefill import find_tile
from pagedkv.attention.triton_tile import attend


@triton.jit(do_not_specialize=["num_groups", "table_stride", "num_parts"])  # they change from step to step
def shared_prefix_kernel(
    part_acc,
    part_lse,
    q,
    q_strides,
    query_start,
    seq_lens,
    shared_lens,
    group_start,
    members,
    num_groups,
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
    scale,
    softcap,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (B // SEQS + num_groups, Hkv, splits) with SEQS = ROWS // GROUP sequences to a tile.

    group_start [num_groups + 1] int32 cuts members [B] int32 (sequence numbers, each once) into groups;
    shared_lens [B] int32 is the same for all members of a group.
    """
    SEQS: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group, tile = find_tile(group_start, num_groups, tl.program_id(0), SEQS)
    first_member = tl.load(group_start + group)
    num_members = tl.load(group_start + group + 1) - first_member
    if tile * SEQS >= num_members:
        return
    leader = tl.load(members + first_member)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    index = tile * SEQS + rows // GROUP
    counts = (rows < SEQS * GROUP) & (index < num_members)
    seqs = tl.load(members + first_member + index, mask=counts, other=0)
    tokens = tl.load(query_start + seqs, mask=counts, other=0)
    counts = counts & (tl.load(query_start + seqs + 1, mask=counts, other=0) > tokens)
    heads = kv_head * GROUP + rows % GROUP
    at = (tokens.to(tl.int64) * q_strides[0] + heads * q_strides[1])[:, None] + (dims * q_strides[2])[None, :]
    queries = tl.load(q + at, mask=counts[:, None] & (dims < HEAD_DIM)[None, :], other=0.0).to(COMPUTE)
    ends = tl.load(seq_lens + seqs, mask=counts, other=0)

    stop = tl.load(shared_lens + leader)
    start = tl.zeros_like(stop)
    if WINDOW > 0:  # the shortest member looks back furthest
        start = tl.maximum(start, tl.min(tl.where(counts, ends, 2147483647), axis=0) - WINDOW)
    start, stop = split_range(tl.minimum(start, stop), stop, split, tl.num_programs(2), TILE)
    begins = ends - WINDOW
    ends = tl.minimum(ends, stop)

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    table = block_table + leader.to(tl.int64) * table_stride
    peak, total, acc = attend(
        queries, peak, total, acc, begins, ends, start, stop, table, kv_head,
        k_pool, v_pool, k_scale, v_scale, k_strides, v_strides, scale_strides, scale, softcap,
        ROWS, TILE, HEAD_DIM, BLOCK_D, BLOCK_SIZE, WINDOW > 0, SOFTCAP, KV_FORMAT, PRECISION, MASKED=True,
    )  # fmt: skip
    finish(
        peak, total, acc, tokens, heads, counts, part_acc, q_strides, part_acc, part_lse, split, num_parts,
        part_acc, HEAD_DIM, BLOCK_D, NUM_HEADS, False, False,
    )  # fmt: skip
