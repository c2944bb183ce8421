#define PAGEDKV_NS avx512
#include "simd_avx512.hpp"
//
#include "attention_kernel.hpp"

namespace pagedkv {
extern const AttentionKernels attention_avx512;
const AttentionKernels attention_avx512 = avx512::kAttention;
}  // namespace pagedkv
