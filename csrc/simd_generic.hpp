// Four lanes through the compiler's vector extension: any processor. No fused multiply-add.
#pragma once
#include "numbers.hpp"

namespace pagedkv::PAGEDKV_NS {

constexpr int kLanes = 4;
constexpr int kBlockRows = 4;     // rows x vectors of a product that stay in registers
constexpr int kBlockVectors = 2;
constexpr int kTileRows = 2;
constexpr int kGroupTileRows = 1;  // beside them a second set of accumulators, for the group
constexpr bool kFloatPairs = true;  // few rows multiply integers as floats, not as bf16
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
struct FloatPair {
  vf even, odd;
};

static inline vf load(const float* p) {
  vf x;
  std::memcpy(&x, p, 16);
  return x;
}
static inline void store(float* p, vf x) { std::memcpy(p, &x, 16); }
// The first n lanes; the others are 0, and memory past them is not touched. n may be less than 0 or more than kLanes.
static inline vf load_first(const float* p, int n) {
  vf x = {};
  for (int i = 0; i < kLanes && i < n; ++i) x[i] = p[i];
  return x;
}
static inline void store_first(float* p, vf x, int n) {
  for (int i = 0; i < kLanes && i < n; ++i) p[i] = x[i];
}
static inline vf splat(float x) { return vf{x, x, x, x}; }
static inline vf add(vf a, vf b) { return a + b; }
static inline vf sub(vf a, vf b) { return a - b; }
static inline vf mul(vf a, vf b) { return a * b; }
static inline vf div(vf a, vf b) { return a / b; }
static inline vf root(vf a) {
  for (int i = 0; i < kLanes; ++i) a[i] = __builtin_sqrtf(a[i]);
  return a;
}
static inline vf fma(vf a, vf b, vf c) { return a * b + c; }
static inline vf max(vf a, vf b) { return a > b ? a : b; }  // b where either is NaN
static inline vf min(vf a, vf b) { return a < b ? a : b; }
static inline float first_lane(vf x) { return x[0]; }
static inline float hmax(vf x) {
  const float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
  return a > b ? a : b;
}
static inline float hsum(vf x) { return (x[0] + x[2]) + (x[1] + x[3]); }
// x where low <= first + lane < high, else fill
static inline vf keep(vf x, int first, int low, int high, float fill) {
  const vi at = vi{first, first + 1, first + 2, first + 3};
  return (at >= low) & (at < high) ? x : splat(fill);
}
static inline vf round_even(vf x) {  // |x| < 2^22
  const vf magic = splat(0x1.8p23f);
  return (x + magic) - magic;
}
// 2^n for whole -127 <= n <= 127; 0 for -127
static inline vf power_of_two(vf n) {
  vi bits = (__builtin_convertvector(n, vi) + 127) << 23;
  vf x;
  std::memcpy(&x, &bits, 16);
  return x;
}
// x * 2^n for whole n in [-126, 127]
static inline vf scale(vf x, vf n) { return mul(x, power_of_two(n)); }
template <class T>
static inline vf load_as(const T* p) {
  return vf{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])};
}
template <class T>
static inline void store_as(T* p, vf x) {
  for (int i = 0; i < 4; ++i) narrow(x[i], p[i]);
}
static inline void store_rounded(bfloat_t* p, vf x) { store_as(p, x); }

// Pairs of bf16 in a dword: the even one in its low half.
static inline vi load_words(const void* p) {
  vi x;
  std::memcpy(&x, p, 16);
  return x;
}
static inline void store_words(void* p, vi x) { std::memcpy(p, &x, 16); }
static inline vf floats_of(vi bits) {
  vf x;
  std::memcpy(&x, &bits, 16);
  return x;
}
// acc + w.even * x.even + w.odd * x.odd
static inline vf dot(vf acc, vi w, uint32_t x) {
  acc = fma(floats_of(w << 16), splat(from_bits(x << 16)), acc);
  return fma(floats_of(w & static_cast<int32_t>(0xffff0000u)), splat(from_bits(x & 0xffff0000u)), acc);
}
// Whole numbers of at most eight significant bits: the upper half of the float is the bf16.
static inline vi pairs_of(vi even, vi odd) {
  const vf low = __builtin_convertvector(even, vf), high = __builtin_convertvector(odd, vf);
  vi a, b;
  std::memcpy(&a, &low, 16);
  std::memcpy(&b, &high, 16);
  return (a >> 16 & 0xffff) | (b & static_cast<int32_t>(0xffff0000u));
}
typedef int NibbleTable;  // what is added to every value
static inline NibbleTable nibble_table(int offset) { return offset; }
// Pair j of the four in a dword: nibble j of its low half and of its high half.
static inline vi nibble_pairs(vi words, int j, NibbleTable offset) {
  return pairs_of((words >> (4 * j) & 15) + offset, (words >> (16 + 4 * j) & 15) + offset);
}
static inline vi byte_words(const int8_t* p) {
  typedef int8_t narrow_t __attribute__((vector_size(8)));
  typedef int16_t wide_t __attribute__((vector_size(16)));
  narrow_t bytes;
  std::memcpy(&bytes, p, 8);
  const wide_t wide = __builtin_convertvector(bytes, wide_t);
  vi words;
  std::memcpy(&words, &wide, 16);
  return words;
}
static inline vi byte_pairs(const int8_t* p) {
  const vi words = byte_words(p);
  return pairs_of(words << 16 >> 16, words >> 16);
}

// The same pairs as floats, for dot products of those.
static inline FloatPair nibble_floats(vi words, int j) {
  return {__builtin_convertvector(words >> (4 * j) & 15, vf), __builtin_convertvector(words >> (16 + 4 * j) & 15, vf)};
}
static inline FloatPair byte_floats(const int8_t* p) {
  const vi words = byte_words(p);
  return {__builtin_convertvector(words << 16 >> 16, vf), __builtin_convertvector(words >> 16, vf)};
}

// out[c][r] = rows[r][c] for kLanes rows and columns
static inline void transpose(const float* const* rows, int column, float* out, int stride) {
  for (int c = 0; c < 4; ++c)
    for (int r = 0; r < 4; ++r) out[c * stride + r] = rows[r][column + c];
}
static inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }       // into the second level
static inline void prefetch_near(const void* p) { __builtin_prefetch(p, 0, 3); }  // into the first

}  // namespace pagedkv::PAGEDKV_NS
