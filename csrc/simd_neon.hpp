// Four lanes: NEON on aarch64, fused multiply-add included.
#pragma once
#include <arm_neon.h>

#include "numbers.hpp"

namespace pagedkv::PAGEDKV_NS {

constexpr int kLanes = 4;
constexpr int kBlockRows = 6;  // rows x vectors of a product that stay in registers
constexpr int kBlockVectors = 4;
constexpr int kTileRows = 2;       // of a panel of eight vectors: 16 accumulators of the 32 registers
constexpr int kGroupTileRows = 1;  // beside them a second set of accumulators, for the group
constexpr bool kFloatPairs = true;  // few rows multiply integers as floats, not as bf16
typedef float32x4_t vf;
typedef uint32x4_t vi;
struct FloatPair {
  vf even, odd;
};

static inline vf load(const float* p) { return vld1q_f32(p); }
static inline void store(float* p, vf x) { vst1q_f32(p, x); }
// The first n lanes; the others are 0, and memory past them is not touched. n may be less than 0 or more than kLanes.
static inline vf load_first(const float* p, int n) {
  float all[kLanes] = {};
  for (int i = 0; i < kLanes && i < n; ++i) all[i] = p[i];
  return load(all);
}
static inline void store_first(float* p, vf x, int n) {
  float all[kLanes];
  store(all, x);
  for (int i = 0; i < kLanes && i < n; ++i) p[i] = all[i];
}
static inline vf splat(float x) { return vdupq_n_f32(x); }
static inline vf add(vf a, vf b) { return vaddq_f32(a, b); }
static inline vf sub(vf a, vf b) { return vsubq_f32(a, b); }
static inline vf mul(vf a, vf b) { return vmulq_f32(a, b); }
static inline vf div(vf a, vf b) { return vdivq_f32(a, b); }
static inline vf root(vf a) { return vsqrtq_f32(a); }
static inline vf fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
static inline vf max(vf a, vf b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // b where either is NaN
static inline vf min(vf a, vf b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
static inline float first_lane(vf x) { return vgetq_lane_f32(x, 0); }
static inline float hmax(vf x) {
  float v[4];
  store(v, x);
  const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
  return a > b ? a : b;
}
static inline float hsum(vf x) {
  float v[4];
  store(v, x);
  return (v[0] + v[2]) + (v[1] + v[3]);
}
// x where low <= first + lane < high, else fill
static inline vf keep(vf x, int first, int low, int high, float fill) {
  const int32_t lanes[4] = {first, first + 1, first + 2, first + 3};
  const int32x4_t at = vld1q_s32(lanes);
  const uint32x4_t inside = vandq_u32(vcgeq_s32(at, vdupq_n_s32(low)), vcltq_s32(at, vdupq_n_s32(high)));
  return vbslq_f32(inside, x, splat(fill));
}
static inline vf round_even(vf x) { return vrndnq_f32(x); }
// 2^n for whole -127 <= n <= 127; 0 for -127
static inline vf power_of_two(vf n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}
// x * 2^n for whole n in [-126, 127]
static inline vf scale(vf x, vf n) { return mul(x, power_of_two(n)); }
template <class T>
static inline vf load_as(const T* p) {
  const float lanes[4] = {widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])};
  return load(lanes);
}
static inline vf load_as(const float* p) { return load(p); }
static inline vf load_as(const bfloat_t* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p)), 16));
}
static inline vf load_as(const half_t* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p))));
}
template <class T>
static inline void store_as(T* p, vf x) {
  float lanes[4];
  store(lanes, x);
  for (int i = 0; i < 4; ++i) narrow(lanes[i], p[i]);
}
static inline void store_as(bfloat_t* p, vf x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t near = vaddq_u32(vaddq_u32(bits, odd), vdupq_n_u32(0x7fff));
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  vst1_u16(reinterpret_cast<uint16_t*>(p), vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), near, quiet), 16));
}
static inline void store_rounded(bfloat_t* p, vf x) { store_as(p, x); }

// Pairs of bf16 in a dword: the even one in its low half.
static inline vi load_words(const void* p) { return vld1q_u32(static_cast<const uint32_t*>(p)); }
static inline void store_words(void* p, vi x) { vst1q_u32(static_cast<uint32_t*>(p), x); }
// acc + w.even * x.even + w.odd * x.odd
static inline vf dot(vf acc, vi w, uint32_t x) {
  acc = fma(vreinterpretq_f32_u32(vshlq_n_u32(w, 16)), splat(from_bits(x << 16)), acc);
  return fma(vreinterpretq_f32_u32(vandq_u32(w, vdupq_n_u32(0xffff0000u))), splat(from_bits(x & 0xffff0000u)), acc);
}
// Whole numbers of at most eight significant bits: the upper half of the float is the bf16.
static inline vi pairs_of(int32x4_t even, int32x4_t odd) {
  const uint32x4_t low = vshrq_n_u32(vreinterpretq_u32_f32(vcvtq_f32_s32(even)), 16);
  return vorrq_u32(low, vandq_u32(vreinterpretq_u32_f32(vcvtq_f32_s32(odd)), vdupq_n_u32(0xffff0000u)));
}
typedef int32x4_t NibbleTable;  // what is added to every value
static inline NibbleTable nibble_table(int offset) { return vdupq_n_s32(offset); }
// Pair j of the four in a dword: nibble j of its low half and of its high half.
static inline vi nibble_pairs(vi words, int j, const NibbleTable& offset) {
  const uint32x4_t shifted = vshlq_u32(words, vdupq_n_s32(-4 * j)), mask = vdupq_n_u32(15);
  const uint32x4_t even = vandq_u32(shifted, mask), odd = vandq_u32(vshrq_n_u32(shifted, 16), mask);
  return pairs_of(vaddq_s32(vreinterpretq_s32_u32(even), offset), vaddq_s32(vreinterpretq_s32_u32(odd), offset));
}
static inline vi byte_pairs(const int8_t* p) {
  const int32x4_t words = vreinterpretq_s32_s16(vmovl_s8(vld1_s8(p)));
  return pairs_of(vshrq_n_s32(vshlq_n_s32(words, 16), 16), vshrq_n_s32(words, 16));
}

// The same pairs as floats, for dot products of those.
static inline FloatPair nibble_floats(vi words, int j) {
  const uint32x4_t shifted = vshlq_u32(words, vdupq_n_s32(-4 * j)), mask = vdupq_n_u32(15);
  return {vcvtq_f32_u32(vandq_u32(shifted, mask)), vcvtq_f32_u32(vandq_u32(vshrq_n_u32(shifted, 16), mask))};
}
static inline FloatPair byte_floats(const int8_t* p) {
  const int32x4_t words = vreinterpretq_s32_s16(vmovl_s8(vld1_s8(p)));
  return {vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(words, 16), 16)), vcvtq_f32_s32(vshrq_n_s32(words, 16))};
}

// out[c][r] = rows[r][c] for kLanes rows and columns
static inline void transpose(const float* const* rows, int column, float* out, int stride) {
  const float32x4x2_t a = vtrnq_f32(load(rows[0] + column), load(rows[1] + column));
  const float32x4x2_t b = vtrnq_f32(load(rows[2] + column), load(rows[3] + column));
  store(out, vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0])));
  store(out + stride, vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1])));
  store(out + 2 * stride, vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0])));
  store(out + 3 * stride, vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1])));
}
static inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }       // into the second level
static inline void prefetch_near(const void* p) { __builtin_prefetch(p, 0, 3); }  // into the first

}  // namespace pagedkv::PAGEDKV_NS
