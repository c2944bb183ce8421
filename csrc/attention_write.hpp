// New keys and values into their slots, converted to the pool's format. Over the vectors of one instruction set.
#pragma once
#include "attention.hpp"

namespace pagedkv::PAGEDKV_NS {

static inline void to_floats(const RowsView& rows, int64_t at, int D, float* to) {
  if (rows.dtype == DType::f32) widen_row(static_cast<const float*>(rows.data) + at, D, to, D);
  else if (rows.dtype == DType::bf16) widen_row(static_cast<const bfloat_t*>(rows.data) + at, D, to, D);
  else widen_row(static_cast<const half_t*>(rows.data) + at, D, to, D);
}

template <class T>
static inline void narrow_row(const float* from, int D, T* to) {
  int d = 0;
  for (; d + kLanes <= D; d += kLanes) store_as(to + d, load(from + d));
  for (; d < D; ++d) narrow(from[d], to[d]);
}

// One scale per row: its largest magnitude becomes `limit`, so nothing is clipped but infinities, which saturate.
// A NaN makes the scale NaN, so that it is not hidden. Scalar on purpose: the same bits from every instruction set.
template <class T, class Round>
static inline float quantise_row(float* row, int D, T* to, float limit, Round round) {
  constexpr float largest = 3.4e38f;  // a little below the end, so that limit * (largest / limit) is finite
  float top = 0.0f;
  bool nan = false;
  for (int d = 0; d < D; ++d) {
    float x = row[d];
    nan |= x != x;
    x = x > largest ? largest : x < -largest ? -largest : x;
    row[d] = x;
    const float magnitude = x < 0.0f ? -x : x;
    top = magnitude > top ? magnitude : top;
  }
  float factor = top > 0.0f && !nan ? limit / top : 0.0f;
  if (factor > largest) factor = 0.0f;  // a row of subnormals is stored as zeros
  for (int d = 0; d < D; ++d) {
    float x = nan ? 0.0f : row[d] * factor;
    x = x > limit ? limit : x < -limit ? -limit : x;
    round(x, to[d]);
  }
  return nan ? __builtin_nanf("") : top / limit;
}

static inline void round_int8(float x, int8_t& out) {
  constexpr float magic = 0x1.8p23f;  // the sum's ulp is 1: the addition rounds to nearest, ties to even
  out = static_cast<int8_t>(static_cast<int32_t>(to_bits(x + magic) - to_bits(magic)));
}
static inline void round_e4m3(float x, e4m3_t& out) { narrow(x, out); }

static inline void write_row(const RowsView& rows, int64_t token, int64_t head, const PoolView& pool, DType dtype,
                             int64_t block, int64_t offset, int D) {
  float row[kMaxHeadDim + 16];
  to_floats(rows, token * rows.token_stride + head * rows.head_stride, D, row);
  const int64_t at = block * pool.block_stride + head * pool.head_stride + offset * pool.slot_stride;
  float* scale = pool.scales == nullptr ? nullptr
                                        : pool.scales + block * pool.scale_block_stride +
                                              head * pool.scale_head_stride + offset * pool.scale_slot_stride;
  switch (dtype) {
    case DType::f32: return narrow_row(row, D, static_cast<float*>(pool.data) + at);
    case DType::f16: return narrow_row(row, D, static_cast<half_t*>(pool.data) + at);
    case DType::bf16: return narrow_row(row, D, static_cast<bfloat_t*>(pool.data) + at);
    case DType::i8: *scale = quantise_row(row, D, static_cast<int8_t*>(pool.data) + at, 127.0f, round_int8); return;
    case DType::f8e4m3:
      *scale = quantise_row(row, D, static_cast<e4m3_t*>(pool.data) + at, 448.0f, round_e4m3);
      return;
  }
}

static void write_rows(const WriteArgs& args, int64_t first, int64_t last) {
  for (int64_t token = first; token < last; ++token) {
    const int64_t slot = args.slot_mapping[token];
    if (slot < 0) continue;
    const int64_t block = slot / args.block_size, offset = slot % args.block_size;
    for (int64_t head = 0; head < args.num_kv_heads; ++head) {
      write_row(args.k, token, head, args.k_pool, args.kv_dtype, block, offset, args.head_dim);
      write_row(args.v, token, head, args.v_pool, args.kv_dtype, block, offset, args.head_dim);
    }
  }
}

}  // namespace pagedkv::PAGEDKV_NS
