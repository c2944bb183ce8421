#define PAGEDKV_LANES lanes_avx2
#include "elementwise_kernel.hpp"

namespace pagedkv {
extern const ElementwiseKernels elementwise_avx2;
const ElementwiseKernels elementwise_avx2 = lanes_avx2::kElementwise;
}  // namespace pagedkv
