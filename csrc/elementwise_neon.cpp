#define PAGEDKV_LANES lanes_neon
#include "elementwise_kernel.hpp"

namespace pagedkv {
extern const ElementwiseKernels elementwise_neon;
const ElementwiseKernels elementwise_neon = lanes_neon::kElementwise;
}  // namespace pagedkv
