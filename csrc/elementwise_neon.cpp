#define PAGEDKV_NS lanes_neon
#include "simd_neon.hpp"
//
#include "elementwise_kernel.hpp"

namespace pagedkv {
extern const ElementwiseKernels elementwise_neon;
const ElementwiseKernels elementwise_neon = lanes_neon::kElementwise;
}  // namespace pagedkv
