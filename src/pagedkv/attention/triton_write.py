"""write_kv on a GPU: the new tokens' K and V into their slots, quantised on the way where the pool is.

One program per (token, tile of KV heads); a negative slot writes nothing, so padding rows of a captured graph are
free. Quantised formats keep one float32 scale per token and head, beside the block and written in the same launch.
e4m3 is made by integer arithmetic, rounding to nearest, ties to even, saturating at 448: the same on every target,
also on those that have no such type.
"""

from __future__ import annotations

import triton
import triton.language as tl

INT8_MAX = tl.constexpr(127.0)
E4M3_MAX = tl.constexpr(448.0)
FLOAT_MAX = tl.constexpr(3.4e38)  # a little below the end, so that limit * (FLOAT_MAX / limit) is finite


@triton.jit
def to_int8(x):
    """float32 in [-127, 127] -> the nearest int8, ties to even: the low bits after adding 1.5 * 2^23."""
    return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def to_e4m3_bits(x):
    """float32 in [-448, 448] -> the byte of the nearest e4m3 number, ties to even.

    Normal numbers: round the float32 mantissa to 3 bits by an integer addition and move the exponent bias from 127
    to 7. Below 2^-6 e4m3 counts in steps of 2^-9, which is the last place of a float32 near 2^14.
    """
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    return (sign | tl.where(size < (121 << 23), small, normal)).to(tl.uint8)


@triton.jit
def store_rows(values, pool, at, mask, scale, scale_at, scale_mask, KV_FORMAT: tl.constexpr):
    """values [HEADS, D] into the pool, with their scales [HEADS] where the format has them."""
    if KV_FORMAT == "plain":
        tl.store(pool + at, values.to(pool.dtype.element_ty), mask=mask)
    else:
        # the arithmetic of reference.quantise, step by step, so that both store the same bytes
        limit = INT8_MAX if KV_FORMAT == "int8" else E4M3_MAX
        values = values.to(tl.float32)
        broken = tl.max((values != values).to(tl.int32), axis=1) > 0
        sizes = tl.minimum(tl.abs(tl.where(broken[:, None], 0.0, values)), FLOAT_MAX)
        largest = tl.max(sizes, axis=1)
        limits = tl.zeros_like(largest) + limit
        factor = tl.where(largest > 0.0, tl.div_rn(limits, tl.where(largest > 0.0, largest, 1.0)), 0.0)
        factor = tl.where(factor == float("inf"), 0.0, factor)
        scaled = tl.minimum(sizes * factor[:, None], limit)
        sign = tl.where(values == values, values, 0.0).to(tl.int32, bitcast=True) & -2147483648
        scaled = (scaled.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        step = tl.where(broken, float("nan"), tl.div_rn(largest, limits))  # a NaN shows in the scale
        if KV_FORMAT == "int8":
            tl.store(pool + at, to_int8(scaled), mask=mask)
        else:
            tl.store(pool + at, to_e4m3_bits(scaled), mask=mask)
        tl.store(scale + scale_at, step, mask=scale_mask)


@triton.jit
def write_kv_kernel(
    k,
    v,
    k_in_strides,
    v_in_strides,
    slot_mapping,
    k_pool,
    v_pool,
    k_scale,
    v_scale,
    k_strides,
    v_strides,
    scale_strides,
    HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_FORMAT: tl.constexpr,
):
    """Grid (T, ceil(Hkv / HEADS)). slot_mapping [T] int64: block * BLOCK_SIZE + offset, or negative: skip."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, BLOCK_D)
    head_mask = heads < NUM_KV_HEADS
    mask = head_mask[:, None] & (dims < HEAD_DIM)[None, :]
    heads = heads.to(tl.int64)
    scale_at = block * scale_strides[0] + offset * scale_strides[2] + heads * scale_strides[1]

    rows = tl.load(
        k + token * k_in_strides[0] + (heads * k_in_strides[1])[:, None] + (dims * k_in_strides[2])[None, :],
        mask=mask,
        other=0.0,
    )
    at = block * k_strides[0] + offset * k_strides[2] + (heads * k_strides[1])[:, None] + (dims * k_strides[3])[None, :]
    store_rows(rows, k_pool, at, mask, k_scale, scale_at, head_mask, KV_FORMAT)
    rows = tl.load(
        v + token * v_in_strides[0] + (heads * v_in_strides[1])[:, None] + (dims * v_in_strides[2])[None, :],
        mask=mask,
        other=0.0,
    )
    at = block * v_strides[0] + offset * v_strides[2] + (heads * v_strides[1])[:, None] + (dims * v_strides[3])[None, :]
    store_rows(rows, v_pool, at, mask, v_scale, scale_at, head_mask, KV_FORMAT)
