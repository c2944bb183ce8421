// Four lanes through the compiler's vector extension: any processor. No fused multiply-add.
#pragma once
#include "numbers.hpp"

namespace pagedkv::PAGEDKV_NS {

constexpr int kLanes = 4;
constexpr int kBlockRows = 4;     // rows x vectors of a product that stay in registers
constexpr int kBlockVectors = 2;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));

static inline vf load(const float* p) {
  vf x;
  std::memcpy(&x, p, 16);
  return x;
}
static inline void store(float* p, vf x) { std::memcpy(p, &x, 16); }
static inline vf splat(float x) { return vf{x, x, x, x}; }
static inline vf add(vf a, vf b) { return a + b; }
static inline vf sub(vf a, vf b) { return a - b; }
static inline vf mul(vf a, vf b) { return a * b; }
static inline vf div(vf a, vf b) { return a / b; }
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
template <class T>
static inline vf load_as(const T* p) {
  return vf{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])};
}
template <class T>
static inline void store_as(T* p, vf x) {
  for (int i = 0; i < 4; ++i) narrow(x[i], p[i]);
}
// out[c][r] = rows[r][c] for kLanes rows and columns
static inline void transpose(const float* const* rows, int column, float* out, int stride) {
  for (int c = 0; c < 4; ++c)
    for (int r = 0; r < 4; ++r) out[c * stride + r] = rows[r][column + c];
}
static inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }       // into the second level
static inline void prefetch_near(const void* p) { __builtin_prefetch(p, 0, 3); }  // into the first

}  // namespace pagedkv::PAGEDKV_NS
