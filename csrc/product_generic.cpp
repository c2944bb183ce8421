#define PAGEDKV_NS lanes_generic
#include "simd_generic.hpp"
//
#include "product_table.hpp"

namespace pagedkv {
extern const ProductKernels product_generic;
const ProductKernels product_generic = lanes_generic::kProducts;
}  // namespace pagedkv
