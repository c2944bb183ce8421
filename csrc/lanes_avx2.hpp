// Sixteen floats in two AVX2 registers.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace pagedkv::PAGEDKV_LANES {

struct Lanes {
  __m256 a, b;
};
struct Pairs {
  __m256i a, b;
};

inline __m256i first_eight(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline Lanes zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Lanes broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Lanes load_first(const float* p, int count) {
  return {_mm256_maskload_ps(p, first_eight(count)), _mm256_maskload_ps(p + 8, first_eight(count - 8))};
}
inline void store(float* p, Lanes v) {
  _mm256_storeu_ps(p, v.a);
  _mm256_storeu_ps(p + 8, v.b);
}
inline void store_first(float* p, Lanes v, int count) {
  _mm256_maskstore_ps(p, first_eight(count), v.a);
  _mm256_maskstore_ps(p + 8, first_eight(count - 8), v.b);
}

inline Lanes add(Lanes x, Lanes y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Lanes sub(Lanes x, Lanes y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Lanes mul(Lanes x, Lanes y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Lanes div(Lanes x, Lanes y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Lanes root(Lanes x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
inline Lanes fma(Lanes x, Lanes y, Lanes z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Lanes min(Lanes x, Lanes y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Lanes max(Lanes x, Lanes y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Lanes round(Lanes x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline __m256 power_of_two(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
// x * 2^n for whole n in [-126, 127]
inline Lanes scale(Lanes x, Lanes n) {
  return {_mm256_mul_ps(x.a, power_of_two(n.a)), _mm256_mul_ps(x.b, power_of_two(n.b))};
}

inline __m256 widen_bf16(__m128i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16)); }
inline Lanes load_bf16(const uint16_t* p) {
  const auto* at = reinterpret_cast<const __m128i*>(p);
  return {widen_bf16(_mm_loadu_si128(at)), widen_bf16(_mm_loadu_si128(at + 1))};
}
inline Lanes load_bf16_first(const uint16_t* p, int count) {
  uint16_t all[16] = {};
  std::memcpy(all, p, 2 * static_cast<size_t>(count));
  return load_bf16(all);
}
inline Lanes load_f16(const uint16_t* p) {
  const auto* at = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}
inline __m128i narrow_bf16(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff)), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
  return _mm256_castsi256_si128(packed);
}
inline void store_bf16(uint16_t* p, Lanes v) {
  auto* at = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(at, narrow_bf16(v.a));
  _mm_storeu_si128(at + 1, narrow_bf16(v.b));
}
inline void store_bf16_first(uint16_t* p, Lanes v, int count) {
  uint16_t all[16];
  store_bf16(all, v);
  std::memcpy(p, all, 2 * static_cast<size_t>(count));
}
inline void store_f16_first(uint16_t* p, Lanes v, int count) {
  alignas(16) uint16_t all[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(all), _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_store_si128(reinterpret_cast<__m128i*>(all + 8), _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT));
  std::memcpy(p, all, 2 * static_cast<size_t>(count));
}

inline Pairs load_pairs(const uint16_t* p) {
  const auto* at = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
inline void store_pairs(uint16_t* p, Pairs v) {
  auto* at = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(at, v.a);
  _mm256_storeu_si256(at + 1, v.b);
}

inline __m256 even_of(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 odd_of(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline Lanes dot(Lanes acc, Pairs w, uint32_t x) {
  const __m256 even = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(x << 16)));
  const __m256 odd = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(x & 0xffff0000u)));
  acc.a = _mm256_fmadd_ps(even_of(w.a), even, acc.a);
  acc.b = _mm256_fmadd_ps(even_of(w.b), even, acc.b);
  acc.a = _mm256_fmadd_ps(odd_of(w.a), odd, acc.a);
  acc.b = _mm256_fmadd_ps(odd_of(w.b), odd, acc.b);
  return acc;
}

// The two bytes of bf16(value + offset) for each value of four bits.
struct Table {
  __m256i low, high;
};
inline Table make_table(int offset) {
  alignas(32) uint8_t low[32], high[32];
  for (int i = 0; i < 32; ++i) {
    const float value = static_cast<float>((i & 15) + offset);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    low[i] = static_cast<uint8_t>(bits >> 16);
    high[i] = static_cast<uint8_t>(bits >> 24);
  }
  return {_mm256_load_si256(reinterpret_cast<__m256i*>(low)), _mm256_load_si256(reinterpret_cast<__m256i*>(high))};
}
inline __m256i widen_nibbles(__m256i v, int j, const Table& table) {
  const __m256i index = _mm256_and_si256(_mm256_srli_epi32(v, 4 * j), _mm256_set1_epi16(15));
  const __m256i low = _mm256_and_si256(_mm256_shuffle_epi8(table.low, index), _mm256_set1_epi16(255));
  return _mm256_or_si256(low, _mm256_slli_epi16(_mm256_shuffle_epi8(table.high, index), 8));
}
inline Pairs nibbles(const uint8_t* p, int j, const Table& table) {
  const auto* at = reinterpret_cast<const __m256i*>(p);
  return {widen_nibbles(_mm256_loadu_si256(at), j, table), widen_nibbles(_mm256_loadu_si256(at + 1), j, table)};
}
inline __m256i widen_bytes(const int8_t* p) {
  const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256 even = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, 16), 16));
  const __m256 odd = _mm256_cvtepi32_ps(_mm256_srai_epi32(words, 16));
  // at most eight significant bits: the upper half of the float is the whole number
  return _mm256_blend_epi16(_mm256_srli_epi32(_mm256_castps_si256(even), 16), _mm256_castps_si256(odd), 0xaa);
}
inline Pairs bytes(const int8_t* p) { return {widen_bytes(p), widen_bytes(p + 16)}; }

inline float sum(Lanes v) {
  const __m256 a = _mm256_add_ps(v.a, v.b);
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

constexpr int kTileRows = 3;  // three rows of a panel are 12 accumulators of the 16 registers
constexpr int kGroupTileRows = 2;  // beside them a second set of accumulators, for the group

}  // namespace pagedkv::PAGEDKV_LANES
