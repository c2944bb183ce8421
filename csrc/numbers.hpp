// The number formats of pools and rows, one value at a time. Every instruction set widens and narrows to these bits.
#pragma once
#include <cstdint>
#include <cstring>

namespace pagedkv {

struct half_t {
  uint16_t bits;
};
struct bfloat_t {
  uint16_t bits;
};
struct e4m3_t {
  uint8_t bits;
};

static inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
static inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

static inline float widen(float x) { return x; }
static inline float widen(bfloat_t x) { return from_bits(static_cast<uint32_t>(x.bits) << 16); }
static inline float widen(int8_t x) { return static_cast<float>(x); }
static inline float widen(half_t x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);  // infinity, NaN
  if (magnitude >= 0x0400) return from_bits(sign | ((magnitude << 13) + (112u << 23)));
  return from_bits(sign | to_bits(static_cast<float>(magnitude) * 0x1p-24f));  // subnormal: exact
}
// e4m3 without infinities: bias 7, 0x7f is NaN, largest 448.
static inline float widen(e4m3_t x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x80) << 24, magnitude = x.bits & 0x7f;
  if (magnitude == 0x7f) return from_bits(sign | 0x7fc00000);
  if (magnitude >= 8) return from_bits(sign | ((magnitude << 20) + (120u << 23)));
  return from_bits(sign | to_bits(static_cast<float>(magnitude) * 0x1p-9f));
}

// Round to nearest, ties to even.
static inline void narrow(float x, float& out) { out = x; }
static inline void narrow(float x, bfloat_t& out) {
  const uint32_t bits = to_bits(x);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  out.bits = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static inline void narrow(float x, half_t& out) {
  const uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) {
    out.bits = static_cast<uint16_t>(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
  } else if (magnitude >= 0x477ff000) {  // rounds to 65536 or more
    out.bits = static_cast<uint16_t>(sign | 0x7c00);
  } else if (magnitude >= 0x38800000) {
    out.bits = static_cast<uint16_t>(sign | (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13);
  } else {  // subnormal: adding 0.5 puts the ulp of the sum at 2^-24, so the addition itself rounds
    out.bits = static_cast<uint16_t>(sign | (to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000));
  }
}
// |x| <= 448 (the scale sees to it), finite.
static inline void narrow(float x, e4m3_t& out) {
  const uint32_t bits = to_bits(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
  if (magnitude >= 0x3c800000) {  // 2^-6, the smallest normal
    const uint32_t rounded = magnitude + 0x7ffff + (magnitude >> 20 & 1);
    out.bits = static_cast<uint8_t>(sign | ((rounded - (120u << 23)) >> 20));
  } else {  // subnormal: 2^14 has an ulp of 2^-9
    out.bits = static_cast<uint8_t>(sign | (to_bits(from_bits(magnitude) + 16384.0f) - 0x46800000));
  }
}

}  // namespace pagedkv
