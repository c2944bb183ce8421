#define PAGEDKV_NS lanes_avx512bf16
#include "simd_avx512.hpp"
//
#include "elementwise_kernel.hpp"

namespace pagedkv {
extern const ElementwiseKernels elementwise_avx512bf16;
const ElementwiseKernels elementwise_avx512bf16 = lanes_avx512bf16::kElementwise;
}  // namespace pagedkv
