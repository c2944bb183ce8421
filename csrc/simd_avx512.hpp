// Sixteen lanes: AVX-512 F, BW, DQ, VL.
#pragma once
#include <immintrin.h>

#include "numbers.hpp"

namespace pagedkv::PAGEDKV_NS {

constexpr int kLanes = 16;
constexpr int kBlockRows = 6;  // rows x vectors of a product that stay in registers
constexpr int kBlockVectors = 4;
constexpr int kTileRows = 12;      // of a panel of two vectors: 24 accumulators of the 32 registers
constexpr int kGroupTileRows = 8;  // beside them a second set of accumulators, for the group
constexpr bool kFloatPairs = false;  // one permute makes bf16 of four bits, and one instruction multiplies them
typedef __m512 vf;
typedef __m512i vi;
struct FloatPair {
  vf even, odd;
};

static inline vf load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
// The first n lanes; the others are 0, and memory past them is not touched. n may be less than 0 or more than kLanes.
static inline __mmask16 first_lanes(int n) {
  return static_cast<__mmask16>(n <= 0 ? 0u : n >= 16 ? 0xffffu : (1u << n) - 1u);
}
static inline vf load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
static inline void store_first(float* p, vf x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
static inline vf splat(float x) { return _mm512_set1_ps(x); }
static inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf root(vf a) { return _mm512_sqrt_ps(a); }
static inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf max(vf a, vf b) { return _mm512_max_ps(a, b); }  // b where either is NaN
static inline vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline float first_lane(vf x) { return _mm512_cvtss_f32(x); }
static inline float hmax(vf x) {
  __m256 y = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  z = _mm_max_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
}
static inline float hsum(vf x) {
  __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  z = _mm_add_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
}
// x where low <= first + lane < high, else fill
static inline vf keep(vf x, int first, int low, int high, float fill) {
  const __m512i at = _mm512_add_epi32(_mm512_set1_epi32(first),
                                      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  const __mmask16 inside = _mm512_mask_cmplt_epi32_mask(_mm512_cmpge_epi32_mask(at, _mm512_set1_epi32(low)), at,
                                                        _mm512_set1_epi32(high));
  return _mm512_mask_mov_ps(splat(fill), inside, x);
}
static inline vf round_even(vf x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// 2^n for whole -127 <= n <= 127; 0 for -127
static inline vf power_of_two(vf n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
// x * 2^n for whole n in [-126, 127]
static inline vf scale(vf x, vf n) { return _mm512_scalef_ps(x, n); }
static inline vf load_as(const float* p) { return load(p); }
static inline vf load_as(const bfloat_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static inline vf load_as(const half_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline vf load_as(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
static inline vf load_as(const e4m3_t* p) {
  // the bits, moved into a half's fields, are the value / 2^8, subnormals included; 0x7f is NaN
  const __m256i bits = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi16(0x7f));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(bits, _mm256_set1_epi16(0x80)), 8);
  const __m256i nan =
      _mm256_and_si256(_mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7fff));
  const __m256i half = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign), nan);
  return _mm512_mul_ps(_mm512_cvtph_ps(half), splat(256.0f));
}
static inline void store_as(float* p, vf x) { store(p, x); }
static inline void store_as(bfloat_t* p, vf x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i near = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i top = _mm512_srli_epi32(_mm512_mask_mov_epi32(near, nan, quiet), 16);
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(top));
}
static inline void store_as(half_t* p, vf x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// The same where subnormal numbers may become 0: one instruction.
static inline void store_rounded(bfloat_t* p, vf x) {
#ifdef __AVX512BF16__
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x));
#else
  store_as(p, x);
#endif
}

// Pairs of bf16 in a dword: the even one in its low half.
static inline vi load_words(const void* p) { return _mm512_loadu_si512(p); }
static inline void store_words(void* p, vi x) { _mm512_storeu_si512(p, x); }
// acc + w.even * x.even + w.odd * x.odd
static inline vf dot(vf acc, vi w, uint32_t x) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32(static_cast<int>(x)));
#else
  const vi upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  acc = fma(_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), splat(from_bits(x << 16)), acc);
  return fma(_mm512_castsi512_ps(_mm512_and_si512(w, upper)), splat(from_bits(x & 0xffff0000u)), acc);
#endif
}
// The bf16 of value + offset for every value of four bits. Twice, since the permute looks at five bits.
typedef __m512i NibbleTable;
static inline NibbleTable nibble_table(int offset) {
  alignas(64) uint16_t entries[32];
  for (int i = 0; i < 32; ++i) entries[i] = static_cast<uint16_t>(to_bits(static_cast<float>((i & 15) + offset)) >> 16);
  return _mm512_load_si512(entries);
}
// Pair j of the four in a dword: nibble j of its low half and of its high half.
static inline vi nibble_pairs(vi words, int j, const NibbleTable& table) {
  return _mm512_permutexvar_epi16(_mm512_srli_epi32(words, 4 * static_cast<unsigned>(j)), table);
}
static inline vi byte_pairs(const int8_t* p) {
#ifdef __AVX512BF16__
  return (__m512i)_mm512_cvtne2ps_pbh(load_as(p + 16), load_as(p));
#else
  const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
  const vf even = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 16), 16));
  const vf odd = _mm512_cvtepi32_ps(_mm512_srai_epi32(words, 16));
  // at most eight significant bits: the upper half of the float is the whole number
  return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(_mm512_castps_si512(even), 16),
                                 _mm512_castps_si512(odd));
#endif
}

// The same pairs as floats, for dot products of those.
static inline FloatPair nibble_floats(vi words, int j) {
  const __m512i mask = _mm512_set1_epi32(15);
  return {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(words, 4 * static_cast<unsigned>(j)), mask)),
          _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(words, 16 + 4 * static_cast<unsigned>(j)), mask))};
}
static inline FloatPair byte_floats(const int8_t* p) {
  const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
  return {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 16), 16)),
          _mm512_cvtepi32_ps(_mm512_srai_epi32(words, 16))};
}

// The same for sixteen vectors in registers.
static inline void transpose_registers(__m512 (&r)[16]) {
  __m512 t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
  }
}
// out[c][r] = rows[r][c] for kLanes rows and columns
static inline void transpose(const float* const* rows, int column, float* out, int stride) {
  __m512 r[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(rows[i] + column);
  transpose_registers(r);
  for (int i = 0; i < 16; ++i) store(out + i * stride, r[i]);
}
static inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }  // into the second level
static inline void prefetch_near(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }  // into the first

}  // namespace pagedkv::PAGEDKV_NS
