#define PAGEDKV_NS neon
#include "simd_neon.hpp"
//
#include "attention_kernel.hpp"

namespace pagedkv {
extern const AttentionKernels attention_neon;
const AttentionKernels attention_neon = neon::kAttention;
}  // namespace pagedkv
