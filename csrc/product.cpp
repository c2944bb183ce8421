#include "product.hpp"

#include <algorithm>
#include <atomic>

#include "isa.hpp"
#include "thread_scratch.hpp"

namespace pagedkv {

extern const ProductKernels product_generic;
#if defined(PAGEDKV_X86)
extern const ProductKernels product_avx2, product_avx512, product_avx512bf16;
#elif defined(PAGEDKV_ARM64)
extern const ProductKernels product_neon;
#endif

namespace {
thread_local ThreadScratch thread_scratch;
constexpr int64_t kSerialWork = 1 << 18;  // multiplications that take about ten times as long as waking a thread
}

const ProductKernels& product_kernels() {
  switch (isa()) {
#if defined(PAGEDKV_X86)
    case Isa::avx512bf16: return product_avx512bf16;
    case Isa::avx512: return product_avx512;
    case Isa::avx2: return product_avx2;
#elif defined(PAGEDKV_ARM64)
    case Isa::neon: return product_neon;
#endif
    default: return product_generic;
  }
}

size_t scratch_bytes(const Weight& weight) {
  if (weight.kind == WeightKind::f32 || weight.kind == WeightKind::bf16) return 0;
  const int64_t panel = sums_at(weight);
  // blocks end at whole tiles, so one may be a tile longer than kRowBlock
  const int64_t sums = weight.kind == WeightKind::int4_offset ? (kRowBlock + kGroup) * (weight.depth / kGroup) : 0;
  return static_cast<size_t>((panel + sums) * int64_t{sizeof(float)} + 63) / 64 * 64;
}

int worthwhile_threads(int64_t multiplications, int threads) {
  return std::max(1, static_cast<int>(std::min<int64_t>(threads, multiplications / kSerialWork)));
}

int64_t product_step(const Product& product, int threads) {
  return std::max<int64_t>(1, product.weight.panels() / (8 * threads));
}

void multiply(const Product& product, int threads) {
  threads = worthwhile_threads(product.rows * product.weight.columns * product.weight.depth, threads);
  const ProductFn run = product_of(product.weight.kind);
  const int64_t items = product_items(product), step = product_step(product, threads);
  const auto each = static_cast<int64_t>(scratch_bytes(product.weight));
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads)
  {
    ProductScratch scratch{static_cast<float*>(thread_scratch.get(each))};
    for (int64_t first; (first = next.fetch_add(step, std::memory_order_relaxed)) < items;)
      run(product, first, std::min(first + step, items), scratch);
  }
}

}  // namespace pagedkv
