// Sixteen floats in four NEON registers (aarch64). Half floats are in the base instruction set there.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace pagedkv::PAGEDKV_LANES {

struct Lanes {
  float32x4_t q[4];
};
struct Pairs {
  uint32x4_t q[4];
};

template <typename F>
inline Lanes each(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}

inline Lanes zero() {
  return each([](int) { return vdupq_n_f32(0.0f); });
}
inline Lanes broadcast(float value) {
  return each([=](int) { return vdupq_n_f32(value); });
}
inline Lanes load(const float* p) {
  return each([=](int i) { return vld1q_f32(p + 4 * i); });
}
inline Lanes load_first(const float* p, int count) {
  float all[16] = {};
  std::memcpy(all, p, 4 * static_cast<size_t>(count));
  return load(all);
}
inline void store(float* p, const Lanes& x) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.q[i]);
}
inline void store_first(float* p, const Lanes& x, int count) {
  float all[16];
  store(all, x);
  std::memcpy(p, all, 4 * static_cast<size_t>(count));
}

inline Lanes add(const Lanes& x, const Lanes& y) {
  return each([&](int i) { return vaddq_f32(x.q[i], y.q[i]); });
}
inline Lanes sub(const Lanes& x, const Lanes& y) {
  return each([&](int i) { return vsubq_f32(x.q[i], y.q[i]); });
}
inline Lanes mul(const Lanes& x, const Lanes& y) {
  return each([&](int i) { return vmulq_f32(x.q[i], y.q[i]); });
}
inline Lanes div(const Lanes& x, const Lanes& y) {
  return each([&](int i) { return vdivq_f32(x.q[i], y.q[i]); });
}
inline Lanes root(const Lanes& x) {
  return each([&](int i) { return vsqrtq_f32(x.q[i]); });
}
inline Lanes fma(const Lanes& x, const Lanes& y, const Lanes& z) {
  return each([&](int i) { return vfmaq_f32(z.q[i], x.q[i], y.q[i]); });
}
inline Lanes min(const Lanes& x, const Lanes& y) {
  return each([&](int i) { return vminq_f32(x.q[i], y.q[i]); });
}
inline Lanes max(const Lanes& x, const Lanes& y) {
  return each([&](int i) { return vmaxq_f32(x.q[i], y.q[i]); });
}
inline Lanes round(const Lanes& x) {
  return each([&](int i) { return vrndnq_f32(x.q[i]); });
}
// x * 2^n for whole n in [-126, 127]
inline Lanes scale(const Lanes& x, const Lanes& n) {
  return each([&](int i) {
    const int32x4_t power = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.q[i]), vdupq_n_s32(127)), 23);
    return vmulq_f32(x.q[i], vreinterpretq_f32_s32(power));
  });
}

inline Lanes load_bf16(const uint16_t* p) {
  return each([=](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
}
inline Lanes load_bf16_first(const uint16_t* p, int count) {
  uint16_t all[16] = {};
  std::memcpy(all, p, 2 * static_cast<size_t>(count));
  return load_bf16(all);
}
inline Lanes load_f16(const uint16_t* p) {
  return each([=](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
inline uint16x4_t narrow_bf16(float32x4_t v) {
  const uint32x4_t bits = vreinterpretq_u32_f32(v);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, odd), vdupq_n_u32(0x7fff));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, vdupq_n_u32(0x7fc00000u)), 16);
}
inline void store_bf16(uint16_t* p, const Lanes& x) {
  for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, narrow_bf16(x.q[i]));
}
inline void store_bf16_first(uint16_t* p, const Lanes& x, int count) {
  uint16_t all[16];
  store_bf16(all, x);
  std::memcpy(p, all, 2 * static_cast<size_t>(count));
}
inline void store_f16_first(uint16_t* p, const Lanes& x, int count) {
  uint16_t all[16];
  for (int i = 0; i < 4; ++i) vst1_u16(all + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.q[i])));
  std::memcpy(p, all, 2 * static_cast<size_t>(count));
}

inline Pairs load_pairs(const uint16_t* p) {
  const auto* at = reinterpret_cast<const uint32_t*>(p);
  return {{vld1q_u32(at), vld1q_u32(at + 4), vld1q_u32(at + 8), vld1q_u32(at + 12)}};
}
inline void store_pairs(uint16_t* p, const Pairs& x) {
  for (int i = 0; i < 4; ++i) vst1q_u32(reinterpret_cast<uint32_t*>(p) + 4 * i, x.q[i]);
}
inline Lanes dot(const Lanes& acc, const Pairs& w, uint32_t x) {
  const float32x4_t even = vreinterpretq_f32_u32(vdupq_n_u32(x << 16));
  const float32x4_t odd = vreinterpretq_f32_u32(vdupq_n_u32(x & 0xffff0000u));
  return each([&](int i) {
    const float32x4_t first = vfmaq_f32(acc.q[i], vreinterpretq_f32_u32(vshlq_n_u32(w.q[i], 16)), even);
    return vfmaq_f32(first, vreinterpretq_f32_u32(vandq_u32(w.q[i], vdupq_n_u32(0xffff0000u))), odd);
  });
}

// at most eight significant bits: the upper half of the float is the whole number
inline uint32x4_t pairs_of(int32x4_t even, int32x4_t odd) {
  const uint32x4_t low = vshrq_n_u32(vreinterpretq_u32_f32(vcvtq_f32_s32(even)), 16);
  return vorrq_u32(low, vandq_u32(vreinterpretq_u32_f32(vcvtq_f32_s32(odd)), vdupq_n_u32(0xffff0000u)));
}

using Table = int32x4_t;
inline Table make_table(int offset) { return vdupq_n_s32(offset); }
inline Pairs nibbles(const uint8_t* p, int j, Table offset) {
  Pairs out = load_pairs(reinterpret_cast<const uint16_t*>(p));
  for (auto& words : out.q) {
    const uint32x4_t shifted = vshlq_u32(words, vdupq_n_s32(-4 * j));
    const uint32x4_t even = vandq_u32(shifted, vdupq_n_u32(15));
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(shifted, 16), vdupq_n_u32(15));
    words = pairs_of(vaddq_s32(vreinterpretq_s32_u32(even), offset), vaddq_s32(vreinterpretq_s32_u32(odd), offset));
  }
  return out;
}
inline Pairs bytes(const int8_t* p) {
  Pairs out;
  for (int i = 0; i < 4; ++i) {
    const int32x4_t words = vreinterpretq_s32_s16(vmovl_s8(vld1_s8(p + 8 * i)));
    out.q[i] = pairs_of(vshrq_n_s32(vshlq_n_s32(words, 16), 16), vshrq_n_s32(words, 16));
  }
  return out;
}

inline float sum(const Lanes& x) {
  const float32x4_t a = vaddq_f32(vaddq_f32(x.q[0], x.q[2]), vaddq_f32(x.q[1], x.q[3]));
  const float32x2_t b = vadd_f32(vget_low_f32(a), vget_high_f32(a));
  return vget_lane_f32(b, 0) + vget_lane_f32(b, 1);
}

constexpr int kTileRows = 2;  // two rows of a panel are 16 accumulators of the 32 registers
constexpr int kGroupTileRows = 1;  // beside them a second set of accumulators, for the group

}  // namespace pagedkv::PAGEDKV_LANES
