// Sixteen floats as an array: any compiler, any processor. Also what the other headers are checked against.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace pagedkv::PAGEDKV_LANES {

struct Lanes {
  float v[16];
};
struct Pairs {
  uint32_t v[16];
};

template <typename F>
inline Lanes each(F f) {
  Lanes out;
  for (int i = 0; i < 16; ++i) out.v[i] = f(i);
  return out;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline Lanes zero() { return {}; }
inline Lanes broadcast(float value) {
  return each([=](int) { return value; });
}
inline Lanes load_first(const float* p, int count) {
  return each([=](int i) { return i < count ? p[i] : 0.0f; });
}
inline Lanes load(const float* p) { return load_first(p, 16); }
inline void store_first(float* p, const Lanes& x, int count) {
  for (int i = 0; i < count; ++i) p[i] = x.v[i];
}
inline void store(float* p, const Lanes& x) { store_first(p, x, 16); }

inline Lanes add(const Lanes& x, const Lanes& y) {
  return each([&](int i) { return x.v[i] + y.v[i]; });
}
inline Lanes sub(const Lanes& x, const Lanes& y) {
  return each([&](int i) { return x.v[i] - y.v[i]; });
}
inline Lanes mul(const Lanes& x, const Lanes& y) {
  return each([&](int i) { return x.v[i] * y.v[i]; });
}
inline Lanes div(const Lanes& x, const Lanes& y) {
  return each([&](int i) { return x.v[i] / y.v[i]; });
}
inline Lanes root(const Lanes& x) {
  return each([&](int i) { return std::sqrt(x.v[i]); });
}
// Rounds twice: a fused one would be a library call per lane here.
inline Lanes fma(const Lanes& x, const Lanes& y, const Lanes& z) {
  return each([&](int i) { return x.v[i] * y.v[i] + z.v[i]; });
}
inline Lanes min(const Lanes& x, const Lanes& y) {
  return each([&](int i) { return x.v[i] < y.v[i] ? x.v[i] : y.v[i]; });
}
inline Lanes max(const Lanes& x, const Lanes& y) {
  return each([&](int i) { return x.v[i] > y.v[i] ? x.v[i] : y.v[i]; });
}
inline Lanes round(const Lanes& x) {
  return each([&](int i) { return std::nearbyint(x.v[i]); });
}
// x * 2^n for whole n in [-126, 127]; a NaN stays one through x
inline Lanes scale(const Lanes& x, const Lanes& n) {
  return each([&](int i) {
    const int power = n.v[i] == n.v[i] ? static_cast<int>(n.v[i]) : 0;
    return x.v[i] * float_of(static_cast<uint32_t>(power + 127) << 23);
  });
}

inline uint16_t bf16_of(float value) {
  if (value != value) return 0x7fc0;
  const uint32_t bits = bits_of(value);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline float f32_of_f16(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31u, mantissa = half & 0x3ffu;
  if (exponent == 31) return float_of(sign | 0x7f800000u | (mantissa << 13));
  if (exponent) return float_of(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float small = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
  return sign ? -small : small;
}
inline uint16_t f16_of(float value) {
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (magnitude < 0x38800000u)  // subnormal: adding 0.5 puts the wanted bits last, rounded to nearest even
    return static_cast<uint16_t>(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u));
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}
inline Lanes load_bf16_first(const uint16_t* p, int count) {
  return each([=](int i) { return i < count ? float_of(static_cast<uint32_t>(p[i]) << 16) : 0.0f; });
}
inline Lanes load_bf16(const uint16_t* p) { return load_bf16_first(p, 16); }
inline void store_bf16_first(uint16_t* p, const Lanes& x, int count) {
  for (int i = 0; i < count; ++i) p[i] = bf16_of(x.v[i]);
}
inline void store_bf16(uint16_t* p, const Lanes& x) { store_bf16_first(p, x, 16); }
inline Lanes load_f16(const uint16_t* p) {
  return each([=](int i) { return f32_of_f16(p[i]); });
}
inline void store_f16_first(uint16_t* p, const Lanes& x, int count) {
  for (int i = 0; i < count; ++i) p[i] = f16_of(x.v[i]);
}

inline Pairs load_pairs(const uint16_t* p) {
  Pairs out;
  std::memcpy(out.v, p, 64);
  return out;
}
inline void store_pairs(uint16_t* p, const Pairs& x) { std::memcpy(p, x.v, 64); }
inline Lanes dot(const Lanes& acc, const Pairs& w, uint32_t x) {
  const float even = float_of(x << 16), odd = float_of(x & 0xffff0000u);
  return each([&](int i) {
    const float first = float_of(w.v[i] << 16) * even + acc.v[i];
    return float_of(w.v[i] & 0xffff0000u) * odd + first;
  });
}

using Table = int;
inline Table make_table(int offset) { return offset; }
inline uint32_t pair_of(int even, int odd) {
  return (bits_of(static_cast<float>(even)) >> 16) | (bits_of(static_cast<float>(odd)) & 0xffff0000u);
}
inline Pairs nibbles(const uint8_t* p, int j, Table offset) {
  const Pairs words = load_pairs(reinterpret_cast<const uint16_t*>(p));
  Pairs out;
  for (int i = 0; i < 16; ++i) {
    const uint32_t shifted = words.v[i] >> (4 * j);
    out.v[i] = pair_of(static_cast<int>(shifted & 15u) + offset, static_cast<int>((shifted >> 16) & 15u) + offset);
  }
  return out;
}
inline Pairs bytes(const int8_t* p) {
  Pairs out;
  for (int i = 0; i < 16; ++i) out.v[i] = pair_of(p[2 * i], p[2 * i + 1]);
  return out;
}

inline float sum(const Lanes& x) {
  float half[8];
  for (int i = 0; i < 8; ++i) half[i] = x.v[i] + x.v[i + 8];
  for (int i = 0; i < 4; ++i) half[i] += half[i + 4];
  return (half[0] + half[2]) + (half[1] + half[3]);
}

constexpr int kTileRows = 2;
constexpr int kGroupTileRows = 1;  // beside them a second set of accumulators, for the group

}  // namespace pagedkv::PAGEDKV_LANES
