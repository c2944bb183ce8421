#define PAGEDKV_LANES lanes_generic
#include "elementwise_kernel.hpp"

namespace pagedkv {
extern const ElementwiseKernels elementwise_generic;
const ElementwiseKernels elementwise_generic = lanes_generic::kElementwise;
}  // namespace pagedkv
