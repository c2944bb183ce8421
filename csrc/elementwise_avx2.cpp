#define PAGEDKV_NS lanes_avx2
#include "simd_avx2.hpp"
//
#include "elementwise_kernel.hpp"

namespace pagedkv {
extern const ElementwiseKernels elementwise_avx2;
const ElementwiseKernels elementwise_avx2 = lanes_avx2::kElementwise;
}  // namespace pagedkv
