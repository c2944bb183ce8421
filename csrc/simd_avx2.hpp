// Eight lanes: AVX2 with FMA and F16C.
#pragma once
#include <immintrin.h>

#include "numbers.hpp"

namespace pagedkv::PAGEDKV_NS {

constexpr int kLanes = 8;
constexpr int kBlockRows = 6;  // rows x vectors of a product that stay in registers
constexpr int kBlockVectors = 2;
constexpr int kTileRows = 3;       // of a panel of four vectors: 12 accumulators of the 16 registers
constexpr int kGroupTileRows = 2;  // beside them a second set of accumulators, for the group
constexpr bool kFloatPairs = true;  // few rows multiply integers as floats, not as bf16
typedef __m256 vf;
typedef __m256i vi;
struct FloatPair {
  vf even, odd;
};

static inline vf load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
// The first n lanes; the others are 0, and memory past them is not touched. n may be less than 0 or more than kLanes.
static inline __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline vf load_first(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
static inline void store_first(float* p, vf x, int n) { _mm256_maskstore_ps(p, first_lanes(n), x); }
static inline vf splat(float x) { return _mm256_set1_ps(x); }
static inline vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf root(vf a) { return _mm256_sqrt_ps(a); }
static inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf max(vf a, vf b) { return _mm256_max_ps(a, b); }  // b where either is NaN
static inline vf min(vf a, vf b) { return _mm256_min_ps(a, b); }
static inline float first_lane(vf x) { return _mm256_cvtss_f32(x); }
static inline float hmax(vf x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
static inline float hsum(vf x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
// x where low <= first + lane < high, else fill
static inline vf keep(vf x, int first, int low, int high, float fill) {
  const __m256i at = _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  const __m256i inside = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(low), at),
                                             _mm256_cmpgt_epi32(_mm256_set1_epi32(high), at));
  return _mm256_blendv_ps(splat(fill), x, _mm256_castsi256_ps(inside));
}
static inline vf round_even(vf x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// 2^n for whole -127 <= n <= 127; 0 for -127
static inline vf power_of_two(vf n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
// x * 2^n for whole n in [-126, 127]
static inline vf scale(vf x, vf n) { return mul(x, power_of_two(n)); }
static inline vf load_as(const float* p) { return load(p); }
static inline vf load_as(const bfloat_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline vf load_as(const half_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
static inline vf load_as(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
static inline vf load_as(const e4m3_t* p) {
  // the bits, moved into a half's fields, are the value / 2^8, subnormals included; 0x7f is NaN
  const __m128i bits = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
  const __m128i magnitude = _mm_and_si128(bits, _mm_set1_epi16(0x7f));
  const __m128i sign = _mm_slli_epi16(_mm_and_si128(bits, _mm_set1_epi16(0x80)), 8);
  const __m128i nan = _mm_and_si128(_mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f)), _mm_set1_epi16(0x7fff));
  const __m128i half = _mm_or_si128(_mm_or_si128(_mm_slli_epi16(magnitude, 7), sign), nan);
  return _mm256_mul_ps(_mm256_cvtph_ps(half), splat(256.0f));
}
static inline void store_as(float* p, vf x) { store(p, x); }
static inline void store_as(bfloat_t* p, vf x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i near = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i top = _mm256_srli_epi32(_mm256_blendv_epi8(near, quiet, nan), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(top, top), 0x08);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}
static inline void store_as(half_t* p, vf x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline void store_rounded(bfloat_t* p, vf x) { store_as(p, x); }

// Pairs of bf16 in a dword: the even one in its low half.
static inline vi load_words(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline void store_words(void* p, vi x) { _mm256_storeu_si256((__m256i*)p, x); }
// acc + w.even * x.even + w.odd * x.odd
static inline vf dot(vf acc, vi w, uint32_t x) {
  const vi upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  acc = fma(_mm256_castsi256_ps(_mm256_slli_epi32(w, 16)), splat(from_bits(x << 16)), acc);
  return fma(_mm256_castsi256_ps(_mm256_and_si256(w, upper)), splat(from_bits(x & 0xffff0000u)), acc);
}
// The two bytes of the bf16 of value + offset for every value of four bits.
struct NibbleTable {
  __m256i low, high;
};
static inline NibbleTable nibble_table(int offset) {
  alignas(32) uint8_t low[32], high[32];
  for (int i = 0; i < 32; ++i) {
    const uint32_t bits = to_bits(static_cast<float>((i & 15) + offset));
    low[i] = static_cast<uint8_t>(bits >> 16);
    high[i] = static_cast<uint8_t>(bits >> 24);
  }
  return {_mm256_load_si256((const __m256i*)low), _mm256_load_si256((const __m256i*)high)};
}
// Pair j of the four in a dword: nibble j of its low half and of its high half.
static inline vi nibble_pairs(vi words, int j, const NibbleTable& table) {
  const __m256i index = _mm256_and_si256(_mm256_srli_epi32(words, 4 * j), _mm256_set1_epi16(15));
  const __m256i low = _mm256_and_si256(_mm256_shuffle_epi8(table.low, index), _mm256_set1_epi16(255));
  return _mm256_or_si256(low, _mm256_slli_epi16(_mm256_shuffle_epi8(table.high, index), 8));
}
static inline vi byte_pairs(const int8_t* p) {
  const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
  const vf even = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, 16), 16));
  const vf odd = _mm256_cvtepi32_ps(_mm256_srai_epi32(words, 16));
  // at most eight significant bits: the upper half of the float is the whole number
  return _mm256_blend_epi16(_mm256_srli_epi32(_mm256_castps_si256(even), 16), _mm256_castps_si256(odd), 0xaa);
}

// The same pairs as floats, for dot products of those.
static inline FloatPair nibble_floats(vi words, int j) {
  const __m256i mask = _mm256_set1_epi32(15);
  return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(words, 4 * j), mask)),
          _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(words, 16 + 4 * j), mask))};
}
static inline FloatPair byte_floats(const int8_t* p) {
  const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
  return {_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, 16), 16)),
          _mm256_cvtepi32_ps(_mm256_srai_epi32(words, 16))};
}

// out[c][r] = rows[r][c] for kLanes rows and columns
static inline void transpose(const float* const* rows, int column, float* out, int stride) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(rows[i] + column);
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    store(out + i * stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    store(out + (i + 4) * stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
static inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }  // into the second level
static inline void prefetch_near(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }  // into the first

}  // namespace pagedkv::PAGEDKV_NS
