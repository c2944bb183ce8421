#include "elementwise.hpp"

#include "isa.hpp"

namespace pagedkv {

extern const ElementwiseKernels elementwise_generic;
#if defined(PAGEDKV_X86)
extern const ElementwiseKernels elementwise_avx2, elementwise_avx512, elementwise_avx512bf16;
#elif defined(PAGEDKV_ARM64)
extern const ElementwiseKernels elementwise_neon;
#endif

const ElementwiseKernels& elementwise_kernels() {
  switch (isa()) {
#if defined(PAGEDKV_X86)
    case Isa::avx512bf16: return elementwise_avx512bf16;
    case Isa::avx512: return elementwise_avx512;
    case Isa::avx2: return elementwise_avx2;
#elif defined(PAGEDKV_ARM64)
    case Isa::neon: return elementwise_neon;
#endif
    default: return elementwise_generic;
  }
}

}  // namespace pagedkv
