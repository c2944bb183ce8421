// Sixteen floats in as many vectors as the instruction set needs: what products and row-wise passes are written over,
// so that a packed panel has one order in memory everywhere. Included behind a simd_<isa>.hpp.
#pragma once
#include <cstdint>

namespace pagedkv::PAGEDKV_NS {

constexpr int kVectors = 16 / kLanes;

struct Lanes {
  vf v[kVectors];
};
struct Pairs {  // sixteen pairs of bf16: lane n holds a column's values at k and k + 1
  vi v[kVectors];
};

template <typename T = Lanes, typename F>
static inline T each(F f) {
  T out;
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) out.v[i] = f(i);
  return out;
}

static inline Lanes broadcast(float value) {
  return each([=](int) { return splat(value); });
}
static inline Lanes zero() { return broadcast(0.0f); }
static inline Lanes load_lanes(const float* p) {
  return each([=](int i) { return load(p + i * kLanes); });
}
static inline void store(float* p, const Lanes& x) {
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) store(p + i * kLanes, x.v[i]);
}
// The first n of them, n in 0..16; the others are 0, and memory past them is not touched.
static inline Lanes load_first_lanes(const float* p, int n) {
  return each([=](int i) { return load_first(p + i * kLanes, n - i * kLanes); });
}
static inline void store_first(float* p, const Lanes& x, int n) {
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) store_first(p + i * kLanes, x.v[i], n - i * kLanes);
}

static inline Lanes add(const Lanes& x, const Lanes& y) {
  return each([&](int i) { return add(x.v[i], y.v[i]); });
}
static inline Lanes sub(const Lanes& x, const Lanes& y) {
  return each([&](int i) { return sub(x.v[i], y.v[i]); });
}
static inline Lanes mul(const Lanes& x, const Lanes& y) {
  return each([&](int i) { return mul(x.v[i], y.v[i]); });
}
static inline Lanes div(const Lanes& x, const Lanes& y) {
  return each([&](int i) { return div(x.v[i], y.v[i]); });
}
static inline Lanes root(const Lanes& x) {
  return each([&](int i) { return root(x.v[i]); });
}
static inline Lanes fma(const Lanes& x, const Lanes& y, const Lanes& z) {
  return each([&](int i) { return fma(x.v[i], y.v[i], z.v[i]); });
}
static inline Lanes min(const Lanes& x, const Lanes& y) {
  return each([&](int i) { return min(x.v[i], y.v[i]); });
}
static inline Lanes max(const Lanes& x, const Lanes& y) {
  return each([&](int i) { return max(x.v[i], y.v[i]); });
}
static inline Lanes round_even(const Lanes& x) {
  return each([&](int i) { return round_even(x.v[i]); });
}
static inline Lanes scale(const Lanes& x, const Lanes& n) {
  return each([&](int i) { return scale(x.v[i], n.v[i]); });
}
// In one order for all: halves are added until one vector is left.
static inline float sum(Lanes x) {
  for (int half = kVectors / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x.v[i] = add(x.v[i], x.v[i + half]);
  return hsum(x.v[0]);
}

static inline Lanes load_bf16(const uint16_t* p) {
  return each([=](int i) { return load_as(reinterpret_cast<const bfloat_t*>(p) + i * kLanes); });
}
static inline Lanes load_f16(const uint16_t* p) {
  return each([=](int i) { return load_as(reinterpret_cast<const half_t*>(p) + i * kLanes); });
}
static inline void store_bf16(uint16_t* p, const Lanes& x) {
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) store_rounded(reinterpret_cast<bfloat_t*>(p) + i * kLanes, x.v[i]);
}
static inline void store_bf16_first(uint16_t* p, const Lanes& x, int n) {
  if (n == 16) return store_bf16(p, x);
  uint16_t all[16];
  store_bf16(all, x);
  for (int i = 0; i < n; ++i) p[i] = all[i];
}

static inline Pairs load_pairs(const uint16_t* p) {
  return each<Pairs>([=](int i) { return load_words(p + 2 * i * kLanes); });
}
static inline void store_pairs(uint16_t* p, const Pairs& x) {
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) store_words(p + 2 * i * kLanes, x.v[i]);
}
static inline Lanes dot(const Lanes& acc, const Pairs& w, uint32_t x) {
  return each([&](int i) { return dot(acc.v[i], w.v[i], x); });
}
// Pair j of 0..3 from 64 bytes: sixteen columns of eight k each.
static inline Pairs nibbles(const uint8_t* p, int j, const NibbleTable& table) {
  return each<Pairs>([&](int i) { return nibble_pairs(load_words(p + 4 * i * kLanes), j, table); });
}
// Sixteen pairs of int8.
static inline Pairs bytes(const int8_t* p) {
  return each<Pairs>([=](int i) { return byte_pairs(p + 2 * i * kLanes); });
}

// The same as floats, for where a dot product of bf16 would only take them apart again. The bits are the same.
struct FloatPairs {
  Lanes even, odd;
};
template <typename F>
static inline FloatPairs each_floats(F f) {
  FloatPairs out;
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) {
    const FloatPair pair = f(i);
    out.even.v[i] = pair.even;
    out.odd.v[i] = pair.odd;
  }
  return out;
}
static inline FloatPairs nibbles_as_floats(const uint8_t* p, int j) {
  return each_floats([=](int i) { return nibble_floats(load_words(p + 4 * i * kLanes), j); });
}
static inline FloatPairs bytes_as_floats(const int8_t* p) {
  return each_floats([=](int i) { return byte_floats(p + 2 * i * kLanes); });
}
static inline Lanes dot(const Lanes& acc, const FloatPairs& w, uint32_t x) {
  const Lanes even = broadcast(from_bits(x << 16)), odd = broadcast(from_bits(x & 0xffff0000u));
  return fma(w.odd, odd, fma(w.even, even, acc));
}

}  // namespace pagedkv::PAGEDKV_NS
