#define PAGEDKV_NS lanes_avx512bf16
#include "simd_avx512.hpp"
//
#include "product_table.hpp"

namespace pagedkv {
extern const ProductKernels product_avx512bf16;
const ProductKernels product_avx512bf16 = lanes_avx512bf16::kProducts;
}  // namespace pagedkv
