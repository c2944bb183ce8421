#define PAGEDKV_LANES lanes_generic
#include "product_table.hpp"

namespace pagedkv {
extern const ProductKernels product_generic;
const ProductKernels product_generic = lanes_generic::kProducts;
}  // namespace pagedkv
