#define PAGEDKV_LANES lanes_avx512
#include "product_table.hpp"

namespace pagedkv {
extern const ProductKernels product_avx512;
const ProductKernels product_avx512 = lanes_avx512::kProducts;
}  // namespace pagedkv
