#define PAGEDKV_NS lanes_avx2
#include "simd_avx2.hpp"
//
#include "product_table.hpp"

namespace pagedkv {
extern const ProductKernels product_avx2;
const ProductKernels product_avx2 = lanes_avx2::kProducts;
}  // namespace pagedkv
