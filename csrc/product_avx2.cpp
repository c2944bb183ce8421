#define PAGEDKV_LANES lanes_avx2
#include "product_table.hpp"

namespace pagedkv {
extern const ProductKernels product_avx2;
const ProductKernels product_avx2 = lanes_avx2::kProducts;
}  // namespace pagedkv
