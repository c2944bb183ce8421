"""The inner loop of every Triton attention kernel: a tile of query rows against a range of one sequence's positions.

Owns: reading K and V through the block table, the scores (scale, softcap, masks) and the online softmax.
Knows nothing of how the rows were found: decode, prefill and shared prefix each bring their own rows and range.

The state of a row is (peak, total, acc): the largest score so far in units of log2, the sum of 2^(score - peak) and
the same sum weighted by V. A row that has seen nothing is (-inf, 0, 0); merging it changes nothing.
Online softmax: Milakov and Gimelshein 2018; tiles over K and V: FlashAttention (Dao et al. 2022); through a block
table: PagedAttention (Kwon et al. 2023).

A tile of TILE positions is free of the block size: each of its lanes finds its own block and offset, so it may cover
many small blocks or a part of a large one. Offsets into a pool are 64-bit. What lies outside the asked range is
never loaded, so slots that nobody wrote and table entries after the used part may hold anything.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def e4m3_to_half(bits):
    """The fp8 e4m3 number in each byte as float16, exactly, by integer arithmetic: for targets without the format.

    Sign, exponent and mantissa are moved to float16's places; the exponent bias differs by 8, hence the factor 256,
    which also puts e4m3's subnormal numbers right. The two NaN codes are never written (writes saturate).
    """
    wide = bits.to(tl.uint16)
    placed = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return placed.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def load_tile(pointers, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, KV_FORMAT: tl.constexpr):
    """[TILE, BLOCK_D] values in the type the products are made in; dimensions past HEAD_DIM are 0."""
    inside = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    if BLOCK_D == HEAD_DIM:
        tile = tl.load(pointers)
    elif KV_FORMAT == "plain" or KV_FORMAT == "fp8":
        tile = tl.load(pointers, mask=inside, other=0.0)
    else:
        tile = tl.load(pointers, mask=inside, other=0)
    if KV_FORMAT == "fp8_bits":
        tile = e4m3_to_half(tile)
    return tile.to(DTYPE)


@triton.jit
def rows_by_columns(a, b, ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """a [ROWS, D] times b [TILE, D] transposed -> [ROWS, TILE] in float32. One row is too few for a matrix unit."""
    if ROWS >= 16:
        product = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    else:
        product = tl.sum(a[:, None, :].to(tl.float32) * b[None, :, :].to(tl.float32), axis=2)
    return product


@triton.jit
def weights_by_rows(p, v, acc, ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """acc [ROWS, D] plus p [ROWS, TILE] times v [TILE, D], in float32."""
    if ROWS >= 16:
        result = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    else:
        result = acc + tl.sum(p[:, :, None] * v[None, :, :].to(tl.float32), axis=1)
    return result


@triton.jit
def softcapped(scores, softcap):
    """softcap * tanh(scores / softcap), to a unit in the last place or two.

    tanh(x) = 1 - 2 / (e^(2x) + 1) loses small x to cancellation, and most scores are small beside the cap; there it is
    x times a polynomial in x^2 (fitted to the relative error up to |x| = 0.625). Past x = 32 it is 1 in float32 anyway.
    """
    x = scores / softcap
    square = x * x
    p = -5.704978362e-3 * square + 2.063907873e-2
    p = p * square - 5.373971215e-2
    p = p * square + 1.333144216e-1
    p = p * square - 3.333328194e-1
    small = x + x * square * p
    large = 1.0 - 2.0 / (tl.exp2(tl.minimum(x, 32.0) * (2.0 * LOG2_E)) + 1.0)
    return softcap * tl.where(square < 0.390625, small, large)


@triton.jit
def attend(
    q,
    peak,
    total,
    acc,
    begins,
    ends,
    start,
    stop,
    table,
    kv_head,
    k_pool,
    v_pool,
    k_scale,
    v_scale,
    k_strides,
    v_strides,
    scale_strides,
    scale,
    softcap,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take positions [start, stop) of one sequence into the state (peak, total, acc) of ROWS query rows.

    q             [ROWS, BLOCK_D], the type the products are made in
    begins, ends  [ROWS] int32: row i sees positions begins[i] (if WINDOWED) to ends[i] - 1; ends[i] <= stop
    table         pointer to the sequence's row of the block table
    MASKED        False promises that stop - start is a multiple of TILE and every row that counts sees all of it
    """
    dims = tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, TILE)
    k_pool += kv_head.to(tl.int64) * k_strides[1]
    v_pool += kv_head.to(tl.int64) * v_strides[1]
    k_scale += kv_head.to(tl.int64) * scale_strides[1]
    v_scale += kv_head.to(tl.int64) * scale_strides[1]
    for first in range(start, stop, TILE):
        positions = first + lanes
        # past the range the last position is read once more, so that no load needs a mask; its score is dropped below
        read = tl.minimum(positions, stop - 1) if MASKED else positions
        blocks = tl.load(table + read // BLOCK_SIZE).to(tl.int64)
        slots = read % BLOCK_SIZE
        k_at = (blocks * k_strides[0] + slots * k_strides[2])[:, None] + (dims * k_strides[3])[None, :]
        v_at = (blocks * v_strides[0] + slots * v_strides[2])[:, None] + (dims * v_strides[3])[None, :]

        scores = rows_by_columns(q, load_tile(k_pool + k_at, q.dtype, HEAD_DIM, BLOCK_D, KV_FORMAT), ROWS, PRECISION)
        if KV_FORMAT != "plain":
            scale_at = blocks * scale_strides[0] + slots * scale_strides[2]
            scores *= tl.load(k_scale + scale_at)[None, :]
        if SOFTCAP:
            scores = softcapped(scores * scale, softcap) * LOG2_E
        else:
            scores *= scale * LOG2_E
        if MASKED:
            seen = positions[None, :] < ends[:, None]
            if WINDOWED:
                seen = seen & (positions[None, :] >= begins[:, None])
            scores = tl.where(seen, scores, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - origin[:, None])
        fade = tl.exp2(peak - origin)
        total = total * fade + tl.sum(weights, axis=1)
        if KV_FORMAT != "plain":
            weights *= tl.load(v_scale + scale_at)[None, :]
        v = load_tile(v_pool + v_at, q.dtype, HEAD_DIM, BLOCK_D, KV_FORMAT)
        acc = weights_by_rows(weights, v, acc * fade[:, None], ROWS, PRECISION)
        peak = new_peak
    return peak, total, acc
