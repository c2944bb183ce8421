#include "attention.hpp"

#include <omp.h>

#include <stdexcept>
#include <string>

#include "isa.hpp"
#include "thread_scratch.hpp"

namespace pagedkv {

extern const AttentionKernels attention_generic;
#if defined(PAGEDKV_X86)
extern const AttentionKernels attention_avx2, attention_avx512, attention_avx512bf16;
#elif defined(PAGEDKV_ARM64)
extern const AttentionKernels attention_neon;
#endif

namespace {

constexpr int64_t kSerialCost = 300;    // up to this cost of a plan a parallel region costs more than it saves
constexpr int64_t kSerialTokens = 8;    // the same for writes

thread_local ThreadScratch thread_scratch;

int64_t take(const AttentionPlan& plan) {
  int64_t index;
#pragma omp atomic capture
  index = plan.cursor++;
  return index;
}

}  // namespace

const AttentionKernels& attention_kernels() {
  switch (isa()) {
#if defined(PAGEDKV_X86)
    case Isa::avx2: return attention_avx2;
    case Isa::avx512: return attention_avx512;
    case Isa::avx512bf16: return attention_avx512bf16;
#elif defined(PAGEDKV_ARM64)
    case Isa::neon: return attention_neon;
#endif
    default: return attention_generic;
  }
}

int64_t attention_scratch_bytes(int head_dim, int group) {
  const int64_t padded = (head_dim + 63) / 64 * 64, rows = kMaxRows > group ? kMaxRows : group;
  const int64_t floats = 3 * kTile * padded + rows * (3 * padded + 16 + 5 * 16) + kMaxHeadDim + 2 * 8 * kTile + 64;
  return floats * 4 / 64 * 64 + 64;
}

void attention_team(const AttentionPlan& plan, const AttentionArgs& args) {
  const AttentionKernels& kernels = attention_kernels();
  void* scratch = thread_scratch.get(attention_scratch_bytes(plan.batch.head_dim, plan.group()));
  const int64_t num_items = static_cast<int64_t>(plan.items.size());
#pragma omp single
  plan.cursor = 0;
  const int64_t others = omp_get_num_threads() - 1;
  for (int64_t i = take(plan); i < num_items; i = take(plan)) {
    const int64_t next = i + 1 + others;  // each other thread takes one before this one comes back
    kernels.run_item(plan, args, plan.items[i], next < num_items ? &plan.items[next] : nullptr, scratch);
  }
#pragma omp barrier
  if (plan.split_tokens.empty()) return;
  const int64_t heads = plan.batch.num_heads, num_merges = static_cast<int64_t>(plan.split_tokens.size()) * heads;
#pragma omp for schedule(static)
  for (int64_t i = 0; i < num_merges; ++i)
    kernels.merge(plan, args, plan.split_tokens[i / heads], static_cast<int32_t>(i % heads));
}

void attention(const AttentionPlan& plan, const AttentionArgs& args) {
#pragma omp parallel if (plan.cost > kSerialCost)
  attention_team(plan, args);
}

float read_stream(const float* data, int64_t n) {
  constexpr int64_t kChunk = 1 << 16;
  const AttentionKernels& kernels = attention_kernels();
  float total = 0.0f;
#pragma omp parallel for schedule(static) reduction(+ : total)
  for (int64_t i = 0; i < n; i += kChunk) total += kernels.read(data + i, n - i < kChunk ? n - i : kChunk);
  return total;
}

void check_slots(const int64_t* slots, int64_t n, int64_t num_slots) {
  for (int64_t i = 0; i < n; ++i)
    if (slots[i] < -1 || slots[i] >= num_slots)
      throw std::invalid_argument("slot " + std::to_string(slots[i]) + " of token " + std::to_string(i) +
                                  " lies outside a pool of " + std::to_string(num_slots) + " slots");
}

void write_kv_rows(const WriteArgs& args, int64_t first, int64_t last) {
  attention_kernels().write_rows(args, first, last);
}

void write_kv(const WriteArgs& args) {
  check_slots(args.slot_mapping, args.num_tokens, args.num_slots);
  if (args.num_tokens <= kSerialTokens) return write_kv_rows(args, 0, args.num_tokens);
#pragma omp parallel
  {
    const int64_t threads = omp_get_num_threads(), mine = omp_get_thread_num();
    write_kv_rows(args, args.num_tokens * mine / threads, args.num_tokens * (mine + 1) / threads);
  }
}

}  // namespace pagedkv
