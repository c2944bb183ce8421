"""Where a tile's state goes: straight to the output, or to a part that one merge launch joins with the others.

A part holds, for each (token, query head), acc / total in float32 and lse = peak + log2(total), which is -inf where
the part saw nothing. Parts are joined left to right with weights 2^(lse - largest); a row whose parts are all empty
is zeros, and a sink only adds to the denominator (flash-decoding: Dao et al. 2023; sinks: Xiao et al. 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedkv.attention.triton_tile import LOG2_E


@triton.jit
def finish(
    peak,
    total,
    acc,
    tokens,
    heads,
    counts,
    out,
    out_strides,
    part_acc,
    part_lse,
    part,
    num_parts,
    sinks,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    DIRECT: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Write the state of rows (tokens[i], heads[i]) where counts[i]; ``part`` is this program's place in the parts.

    DIRECT: there is one part only, so this is the result.
    """
    dims = tl.arange(0, BLOCK_D)
    mask = counts[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = tokens.to(tl.int64)
    if DIRECT:
        if SINKS:
            sink = tl.load(sinks + heads, mask=counts, other=0.0).to(tl.float32) * LOG2_E
            new_peak = tl.maximum(peak, sink)
            origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            fade = tl.exp2(peak - origin)
            acc = acc * fade[:, None]
            total = total * fade + tl.exp2(sink - origin)
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        at = (tokens * out_strides[0] + heads * out_strides[1])[:, None] + (dims * out_strides[2])[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
    else:
        row = (tokens * NUM_HEADS + heads) * num_parts + part
        some = total > 0.0
        safe = tl.where(some, total, 1.0)
        tl.store(part_lse + row, tl.where(some, peak + tl.log2(safe), float("-inf")), mask=counts)
        tl.store(part_acc + row[:, None] * HEAD_DIM + dims[None, :], acc / safe[:, None], mask=mask)


@triton.jit(do_not_specialize=["num_parts"])  # it changes from step to step
def merge_kernel(
    out,
    out_strides,
    part_acc,
    part_lse,
    num_parts,
    sinks,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Join the parts of HEADS query heads of one token. Grid (T, ceil(Hq / HEADS))."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, BLOCK_D)
    counts = heads < NUM_HEADS
    mask = counts[:, None] & (dims < HEAD_DIM)[None, :]
    rows = (token * NUM_HEADS + heads) * num_parts
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    for part in range(num_parts):
        peak = tl.maximum(peak, tl.load(part_lse + rows + part, mask=counts, other=float("-inf")))
    if SINKS:
        sink = tl.load(sinks + heads, mask=counts, other=0.0).to(tl.float32) * LOG2_E
        peak = tl.maximum(peak, sink)
    origin = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.zeros([HEADS], tl.float32)
    if SINKS:
        total += tl.exp2(sink - origin)
    acc = tl.zeros([HEADS, BLOCK_D], tl.float32)
    for part in range(num_parts):
        weight = tl.exp2(tl.load(part_lse + rows + part, mask=counts, other=float("-inf")) - origin)
        total += weight
        at = (rows + part)[:, None] * HEAD_DIM + dims[None, :]
        acc += weight[:, None] * tl.load(part_acc + at, mask=mask, other=0.0)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    at = token * out_strides[0] + (heads * out_strides[1])[:, None] + (dims * out_strides[2])[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
