#define PAGEDKV_NS lanes_avx512
#include "simd_avx512.hpp"
//
#include "product_table.hpp"

namespace pagedkv {
extern const ProductKernels product_avx512;
const ProductKernels product_avx512 = lanes_avx512::kProducts;
}  // namespace pagedkv
