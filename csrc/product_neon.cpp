#define PAGEDKV_LANES lanes_neon
#include "product_table.hpp"

namespace pagedkv {
extern const ProductKernels product_neon;
const ProductKernels product_neon = lanes_neon::kProducts;
}  // namespace pagedkv
