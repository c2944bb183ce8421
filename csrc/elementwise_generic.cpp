#define PAGEDKV_NS lanes_generic
#include "simd_generic.hpp"
//
#include "elementwise_kernel.hpp"

namespace pagedkv {
extern const ElementwiseKernels elementwise_generic;
const ElementwiseKernels elementwise_generic = lanes_generic::kElementwise;
}  // namespace pagedkv
