#define PAGEDKV_NS lanes_neon
#include "simd_neon.hpp"
//
#include "product_table.hpp"

namespace pagedkv {
extern const ProductKernels product_neon;
const ProductKernels product_neon = lanes_neon::kProducts;
}  // namespace pagedkv
