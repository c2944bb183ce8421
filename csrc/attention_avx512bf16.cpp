#define PAGEDKV_NS avx512bf16
#define PAGEDKV_BF16
#include "simd_avx512.hpp"
//
#include "attention_kernel.hpp"

namespace pagedkv {
extern const AttentionKernels attention_avx512bf16;
const AttentionKernels attention_avx512bf16 = avx512bf16::kAttention;
}  // namespace pagedkv
