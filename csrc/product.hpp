// out = tail(x @ w.T): products of few or many rows with a weight that was packed once.
//
// A packed weight is a run of panels of 32 columns (a column is an out feature). Inside a panel k runs slowest, so
// a product with one row is one forward walk through memory:
//   f32          [N/32][K][32]
//   bf16         [N/32][K/2][32][2]      the pair k, k + 1 of a column side by side; an odd K ends with a zero
//   int4, int8   [N/32][K/32][group]     a group is 32 k of the panel: the integers, then a factor (half precision)
//                                        per column, then (kinds with an offset) an offset per column
// N is padded with columns of zeros.
//
// Every output is one accumulator that runs over k in order; in the integer kinds a group of 32 is one short dot
// product (the integers are exact in bf16), scaled and shifted in float32, groups in order. Tiles differ in how many
// rows and panels they hold, never in the arithmetic of one output. So a row has the same bits alone and in any
// batch, for any split of the work: the property on which exact batching, chunking and caching rest.
#pragma once
#include <cstddef>
#include <cstdint>

namespace pagedkv {

constexpr int kPanel = 32;  // columns
constexpr int kGroup = 32;  // k that share a factor

enum class WeightKind : int32_t { f32, bf16, int4, int4_offset, int8 };
constexpr int kWeightKinds = 5;

// Bytes of the integers of one group of a panel, and of the whole group.
constexpr int64_t integer_bytes(WeightKind kind) { return kPanel * kGroup / (kind == WeightKind::int8 ? 1 : 2); }
constexpr int64_t group_bytes(WeightKind kind) {
  return integer_bytes(kind) + 2 * kPanel * (kind == WeightKind::int4_offset ? 2 : 1);
}

struct Weight {
  WeightKind kind = WeightKind::f32;
  int32_t columns = 0;  // without padding
  int32_t depth = 0;    // K
  uint8_t* data = nullptr;

  int64_t panels() const { return (columns + kPanel - 1) / kPanel; }
  int64_t panel_bytes() const {
    if (kind == WeightKind::f32) return int64_t{4} * kPanel * depth;
    if (kind == WeightKind::bf16) return int64_t{4} * kPanel * ((depth + 1) / 2);
    return depth / kGroup * group_bytes(kind);
  }
  int64_t bytes() const { return panels() * panel_bytes(); }
};

enum class TailKind : int32_t {
  store,     // out = y
  add,       // out += y, float32 only: the residual stream
  silu_mul,  // out[16 j + i] = silu(y[32 j + i]) * y[32 j + 16 + i]: panels hold 16 gate and 16 up columns
};

struct Tail {
  TailKind kind = TailKind::store;
  const float* bias = nullptr;  // [weight.columns], added first
  void* out = nullptr;          // [rows, columns]
  int64_t stride = 0;           // elements
  int32_t columns = 0;          // of out: weight.columns, or half of it for silu_mul
  bool bf16 = false;            // else float32
};

struct Product {
  const void* x = nullptr;  // [rows, depth]: float32 for an f32 weight, else bf16
  int64_t stride = 0;       // elements
  int64_t rows = 0;
  Weight weight;
  Tail tail;
};

// A product is cut into items: (block of rows, panel), panels fastest. The x of a block stays in the second-level
// cache while its panels pass by. Items write disjoint outputs and may run at the same time, in any order.
constexpr int64_t kRowBlock = 144;
inline int64_t product_blocks(const Product& product) { return (product.rows + kRowBlock - 1) / kRowBlock; }
inline int64_t product_items(const Product& product) { return product_blocks(product) * product.weight.panels(); }
// How many items a thread takes at a time, so that each takes some eight times.
int64_t product_step(const Product& product, int threads);

// What one thread needs beside a product with integers: a panel widened to bf16 and, for kinds with an offset, sums of
// x over each group of the rows of a block.
struct ProductScratch {
  float* data;         // scratch_bytes(weight), aligned to 64
  int64_t block = -1;  // the block whose sums are there; -1 before a product
};
size_t scratch_bytes(const Weight& weight);
// Floats before the sums.
inline int64_t sums_at(const Weight& weight) { return int64_t{weight.depth} * kPanel / 2; }

// Does the items first .. last of a product. Nothing is checked here.
using ProductFn = void (*)(const Product& product, int64_t first, int64_t last, ProductScratch& scratch);

struct ProductKernels {
  ProductFn run[kWeightKinds];  // by WeightKind
};
const ProductKernels& product_kernels();
inline ProductFn product_of(WeightKind kind) { return product_kernels().run[static_cast<int>(kind)]; }

// As many of `threads` as have something to do that is worth starting them. Results do not depend on it.
int worthwhile_threads(int64_t multiplications, int threads);

// A whole product in a parallel region of its own, with its own scratch: what a single linear layer calls.
void multiply(const Product& product, int threads);

}  // namespace pagedkv
