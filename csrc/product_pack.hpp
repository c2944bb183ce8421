// Putting a weight into the order of product.hpp, once, and reading a column of it back.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "attention.hpp"
#include "product.hpp"

namespace pagedkv {

// Memory for weights, in large runs that ask for huge pages: a decode step walks through all of it, and the walk is
// bound by page translation as much as by memory. Freed with the arena.
class WeightArena {
 public:
  WeightArena() = default;
  WeightArena(const WeightArena&) = delete;
  WeightArena& operator=(const WeightArena&) = delete;
  ~WeightArena();
  // 64-byte aligned, zero-filled. Throws std::bad_alloc.
  uint8_t* take(int64_t bytes);

 private:
  struct Run {
    uint8_t* data;
    int64_t size;
  };
  std::vector<Run> runs_;
  int64_t used_ = 0;  // of the last run
};

// Which column row `first + row` of the source becomes.
enum class Place : int32_t {
  straight,  // that one
  gate,      // 16 gate columns ...
  up,        // ... and 16 up columns make a panel (TailKind::silu_mul)
};

// A packed weight and its memory. Rows of a source matrix [out features, in features] become columns.
class PackedWeight {
 public:
  // Throws std::invalid_argument for sizes that the kind cannot have.
  PackedWeight(std::shared_ptr<WeightArena> arena, WeightKind kind, int64_t columns, int64_t depth);

  const Weight& weight() const { return weight_; }

  // source [rows, depth], rows dense, for the kinds f32 and bf16 (rounded to nearest even)
  void put_dense(const void* source, DType dtype, int64_t rows, Place place, int64_t first);
  // values [rows, depth]: 0..15 (int4 kinds) or -128..127 as int8 (int8 kind); factors and offsets half precision
  // [rows, depth / 32]; the weight is value * factor + offset, for int4 without offsets (value - 8) * factor.
  void put_groups(const uint8_t* values, const uint16_t* factors, const uint16_t* offsets, int64_t rows, Place place,
                  int64_t first);

 private:
  void check(int64_t rows, Place place, int64_t first) const;

  std::shared_ptr<WeightArena> arena_;
  Weight weight_;
};

// The `depth` float32 weights of one column: a row of an embedding table.
void read_column(const Weight& weight, int64_t column, float* out);

}  // namespace pagedkv
