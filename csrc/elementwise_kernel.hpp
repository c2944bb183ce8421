// elementwise.hpp over Lanes; included once per instruction set.
#pragma once
#include "elementwise.hpp"
#include "elementwise_math.hpp"

namespace pagedkv::PAGEDKV_NS {

inline int lanes_of(int64_t left) { return left < 16 ? static_cast<int>(left) : 16; }

// 1 / sqrt(mean(x^2) + eps): four accumulators that take turns, then summed in order.
inline Lanes inverse_rms(const float* x, float eps, int64_t width) {
  Lanes acc[4] = {zero(), zero(), zero(), zero()};
  for (int64_t i = 0, turn = 0; i < width; i += 16, turn = (turn + 1) % 4) {
    const Lanes v = load_first_lanes(x + i, lanes_of(width - i));
    acc[turn] = fma(v, v, acc[turn]);
  }
  const float mean = sum(add(add(acc[0], acc[1]), add(acc[2], acc[3]))) / static_cast<float>(width);
  return div(broadcast(1.0f), root(broadcast(mean + eps)));
}

inline void rms_norm(const float* x, const float* weight, float eps, int64_t width, void* out, bool bf16) {
  const Lanes scale = inverse_rms(x, eps, width);
  for (int64_t i = 0; i < width; i += 16) {
    const int count = lanes_of(width - i);
    const Lanes y = mul(mul(load_first_lanes(x + i, count), scale), load_first_lanes(weight + i, count));
    if (bf16)
      store_bf16_first(static_cast<uint16_t*>(out) + i, y, count);
    else
      store_first(static_cast<float*>(out) + i, y, count);
  }
}

inline void rotate(float* heads, const Rotation& rotation) {
  const int64_t width = rotation.head_dim, half = width / 2;
  for (int32_t head = 0; head < rotation.num_heads; ++head, heads += width) {
    if (rotation.norm) rms_norm(heads, rotation.norm, rotation.eps, width, heads, false);
    for (int64_t i = 0; i < half; i += 16) {
      const int count = lanes_of(half - i);
      const Lanes a = load_first_lanes(heads + i, count), b = load_first_lanes(heads + half + i, count);
      const Lanes cos = load_first_lanes(rotation.cos + i, count), sin = load_first_lanes(rotation.sin + i, count);
      store_first(heads + i, sub(mul(a, cos), mul(b, sin)), count);
      store_first(heads + half + i, add(mul(b, cos), mul(a, sin)), count);
    }
  }
}

constexpr ElementwiseKernels kElementwise = {rms_norm, rotate};

}  // namespace pagedkv::PAGEDKV_NS
