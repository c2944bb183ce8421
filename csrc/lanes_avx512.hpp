// Sixteen floats in one AVX-512 register. Dot products of bf16 pairs use vdpbf16ps where the target has it.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace pagedkv::PAGEDKV_LANES {

using Lanes = __m512;
using Pairs = __m512i;  // 16 pairs of bf16: lane n holds the values of column n at k and k + 1

inline __mmask16 first(int count) { return static_cast<__mmask16>((1u << count) - 1u); }

inline Lanes zero() { return _mm512_setzero_ps(); }
inline Lanes broadcast(float value) { return _mm512_set1_ps(value); }
inline Lanes load(const float* p) { return _mm512_loadu_ps(p); }
inline Lanes load_first(const float* p, int count) { return _mm512_maskz_loadu_ps(first(count), p); }
inline void store(float* p, Lanes v) { _mm512_storeu_ps(p, v); }
inline void store_first(float* p, Lanes v, int count) { _mm512_mask_storeu_ps(p, first(count), v); }

inline Lanes add(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
inline Lanes sub(Lanes a, Lanes b) { return _mm512_sub_ps(a, b); }
inline Lanes mul(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
inline Lanes div(Lanes a, Lanes b) { return _mm512_div_ps(a, b); }
inline Lanes root(Lanes a) { return _mm512_sqrt_ps(a); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
inline Lanes min(Lanes a, Lanes b) { return _mm512_min_ps(a, b); }
inline Lanes max(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }
inline Lanes round(Lanes a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// a * 2^n for whole n in [-126, 127]
inline Lanes scale(Lanes a, Lanes n) { return _mm512_scalef_ps(a, n); }

inline Lanes widen_bf16(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }
inline Lanes load_bf16(const uint16_t* p) {
  return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Lanes load_bf16_first(const uint16_t* p, int count) {
  return widen_bf16(_mm256_maskz_loadu_epi16(first(count), p));
}
inline Lanes load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m256i narrow_bf16(Lanes v) {
#ifdef __AVX512BF16__
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v));
#else
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff)), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
  return _mm512_cvtepi32_epi16(rounded);
#endif
}
inline void store_bf16(uint16_t* p, Lanes v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(v));
}
inline void store_bf16_first(uint16_t* p, Lanes v, int count) {
  _mm256_mask_storeu_epi16(p, first(count), narrow_bf16(v));
}
inline void store_f16_first(uint16_t* p, Lanes v, int count) {
  _mm256_mask_storeu_epi16(p, first(count), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline Lanes load_f16_first(const uint16_t* p, int count) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(count), p));
}

inline Pairs load_pairs(const uint16_t* p) { return _mm512_loadu_si512(p); }
inline void store_pairs(uint16_t* p, Pairs v) { _mm512_storeu_si512(p, v); }

// acc + w[even] * x[even] + w[odd] * x[odd], where x holds one pair of bf16
inline Lanes dot(Lanes acc, Pairs w, uint32_t x) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(w),
                          reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(x))));
#else
  const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
  const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  float x0, x1;
  const uint32_t b0 = x << 16, b1 = x & 0xffff0000u;
  std::memcpy(&x0, &b0, 4);
  std::memcpy(&x1, &b1, 4);
  acc = _mm512_fmadd_ps(even, _mm512_set1_ps(x0), acc);
  return _mm512_fmadd_ps(odd, _mm512_set1_ps(x1), acc);
#endif
}

// One entry per value of four bits: bf16 of value + offset. Twice, since the permute looks at five bits.
using Table = __m512i;
inline Table make_table(int offset) {
  alignas(64) uint16_t entries[32];
  for (int i = 0; i < 32; ++i) {
    const float value = static_cast<float>((i & 15) + offset);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    entries[i] = static_cast<uint16_t>(bits >> 16);
  }
  return _mm512_load_si512(entries);
}
inline Pairs nibbles(const uint8_t* p, int j, Table table) {
  return _mm512_permutexvar_epi16(_mm512_srli_epi32(_mm512_loadu_si512(p), 4 * static_cast<unsigned>(j)), table);
}
inline Pairs bytes(const int8_t* p) {
  const auto* at = reinterpret_cast<const __m128i*>(p);
  const Lanes low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at)));
  const Lanes high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at + 1)));
#ifdef __AVX512BF16__
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
#else
  return _mm512_inserti64x4(_mm512_castsi256_si512(narrow_bf16(low)), narrow_bf16(high), 1);
#endif
}

inline float sum(Lanes v) {
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

constexpr int kTileRows = 12;  // twelve rows of a panel are 24 accumulators of the 32 registers
constexpr int kGroupTileRows = 8;  // beside them a second set of accumulators, for the group

}  // namespace pagedkv::PAGEDKV_LANES
