#define PAGEDKV_NS avx2
#include "simd_avx2.hpp"
//
#include "attention_kernel.hpp"

namespace pagedkv {
extern const AttentionKernels attention_avx2;
const AttentionKernels attention_avx2 = avx2::kAttention;
}  // namespace pagedkv
