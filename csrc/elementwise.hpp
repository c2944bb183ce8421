// What happens to one row at a time: norms and rotations. A row is computed the same way whatever stands beside it:
// tails are masked lanes of the same arithmetic, and sums run in one fixed order.
#pragma once
#include <cstdint>

namespace pagedkv {

// One token's heads, float32 [num_heads, head_dim], dense.
struct Rotation {
  const float* cos;   // [head_dim / 2], of the token's position
  const float* sin;   // [head_dim / 2]
  const float* norm;  // [head_dim]: weight of the q or k norm that comes before (Qwen3), or null
  float eps;
  int32_t num_heads;
  int32_t head_dim;  // even
};

struct ElementwiseKernels {
  // out = x / sqrt(mean(x^2) + eps) * weight, width values; out is bf16 or float32 (arXiv 1910.07467)
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t width, void* out, bool bf16);
  // In place: norm of each head, if there is one, then the pairs (i, i + head_dim / 2) turned (arXiv 2104.09864).
  void (*rotate)(float* heads, const Rotation& rotation);
};
const ElementwiseKernels& elementwise_kernels();

}  // namespace pagedkv
