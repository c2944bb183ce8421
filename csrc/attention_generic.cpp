#define PAGEDKV_NS generic
#include "simd_generic.hpp"
//
#include "attention_kernel.hpp"

namespace pagedkv {
extern const AttentionKernels attention_generic;
const AttentionKernels attention_generic = generic::kAttention;
}  // namespace pagedkv
