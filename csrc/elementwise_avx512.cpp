#define PAGEDKV_NS lanes_avx512
#include "simd_avx512.hpp"
//
#include "elementwise_kernel.hpp"

namespace pagedkv {
extern const ElementwiseKernels elementwise_avx512;
const ElementwiseKernels elementwise_avx512 = lanes_avx512::kElementwise;
}  // namespace pagedkv
