// The tiles of product.hpp, written over Lanes; included once per instruction set.
#pragma once
#include <cstring>
#include <type_traits>

#include "elementwise_math.hpp"
#include "product.hpp"

namespace pagedkv::PAGEDKV_LANES {

constexpr int64_t kAheadBytes = 2048;  // of prefetch, for the memory-bound case: few rows

inline uint32_t pair_at(const uint16_t* x, int64_t k) {
  uint32_t pair;
  std::memcpy(&pair, x + k, 4);
  return pair;
}

// acc[r][2 p + h] over all of K: R rows, P panels, halves of 16 columns. w is the first panel.
template <int R, int P>
inline void accumulate(Lanes (&acc)[R][2 * P], const uint16_t* x, int64_t stride, const Weight& weight,
                       const uint8_t* w, int64_t ahead) {
  const int64_t panel = weight.panel_bytes();
  const int even = weight.depth & ~1;
  for (int k = 0; k < even; k += 2) {
    Pairs b[2 * P];
#pragma GCC unroll 4
    for (int c = 0; c < 2 * P; ++c) {
      const uint8_t* at = w + c / 2 * panel + 2 * k * kPanel + c % 2 * 64;
      __builtin_prefetch(at + ahead);
      b[c] = load_pairs(reinterpret_cast<const uint16_t*>(at));
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const uint32_t pair = pair_at(x + r * stride, k);
#pragma GCC unroll 4
      for (int c = 0; c < 2 * P; ++c) acc[r][c] = dot(acc[r][c], b[c], pair);
    }
  }
  if (even == weight.depth) return;
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < 2 * P; ++c) {
      const uint8_t* at = w + c / 2 * panel + int64_t{2} * even * kPanel + c % 2 * 64;
      acc[r][c] = dot(acc[r][c], load_pairs(reinterpret_cast<const uint16_t*>(at)), x[r * stride + even]);
    }
}

template <int R, int P>
inline void accumulate(Lanes (&acc)[R][2 * P], const float* x, int64_t stride, const Weight& weight, const uint8_t* w,
                       int64_t ahead) {
  const int64_t panel = weight.panel_bytes();
  for (int k = 0; k < weight.depth; ++k) {
    Lanes b[2 * P];
#pragma GCC unroll 4
    for (int c = 0; c < 2 * P; ++c) {
      const uint8_t* at = w + c / 2 * panel + int64_t{4} * k * kPanel + c % 2 * 64;
      __builtin_prefetch(at + ahead);
      b[c] = load(reinterpret_cast<const float*>(at));
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const Lanes a = broadcast(x[r * stride + k]);
#pragma GCC unroll 4
      for (int c = 0; c < 2 * P; ++c) acc[r][c] = fma(a, b[c], acc[r][c]);
    }
  }
}

inline void put(const Tail& tail, int64_t row, int64_t column, int count, Lanes v) {
  const int64_t at = row * tail.stride + column;
  if (tail.bf16) {
    uint16_t* out = static_cast<uint16_t*>(tail.out) + at;
    count == 16 ? store_bf16(out, v) : store_bf16_first(out, v, count);
    return;
  }
  float* out = static_cast<float*>(tail.out) + at;
  if (tail.kind == TailKind::add) v = add(load_first(out, count), v);
  count == 16 ? store(out, v) : store_first(out, v, count);
}

inline int lanes_left(int64_t columns) { return static_cast<int>(columns < 0 ? 0 : columns > 16 ? 16 : columns); }

// Both halves of one row of a panel.
inline void finish(const Product& product, int64_t row, int64_t panel, Lanes low, Lanes high) {
  const Tail& tail = product.tail;
  const int64_t column = panel * kPanel;
  if (tail.bias) {
    low = add(low, load_first(tail.bias + column, lanes_left(product.weight.columns - column)));
    const int more = lanes_left(product.weight.columns - column - 16);
    if (more) high = add(high, load_first(tail.bias + column + 16, more));
  }
  if (tail.kind == TailKind::silu_mul) {
    put(tail, row, panel * 16, lanes_left(tail.columns - panel * 16), mul(silu(low), high));
    return;
  }
  put(tail, row, column, lanes_left(tail.columns - column), low);
  const int more = lanes_left(tail.columns - column - 16);
  if (more) put(tail, row, column + 16, more, high);
}

// One tile's place: its rows start at `row`, in the block of rows that starts at `top`. A tile that is `alone` is the
// only one of its panel, so the panel comes from memory; else from the cache, and the tile fetches the next panel.
struct Place {
  int64_t row, top, panel;
  bool alone;
  const float* sums;
};

template <typename T>
struct Dense {
  static constexpr int kRows = kTileRows;
  static constexpr int kMaxPanels = 2;

  template <int R, int P>
  static void tile(const Product& product, const Place& at) {
    const Weight& weight = product.weight;
    Lanes acc[R][2 * P];
    for (auto& of_row : acc)
      for (auto& lanes : of_row) lanes = zero();
    accumulate<R, P>(acc, static_cast<const T*>(product.x) + at.row * product.stride, product.stride, weight,
                     weight.data + at.panel * weight.panel_bytes(), at.alone ? kAheadBytes : weight.panel_bytes());
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) finish(product, at.row + r, at.panel + p, acc[r][2 * p], acc[r][2 * p + 1]);
  }

  static void begin(const Product&, int64_t, int64_t, float*) {}
};

// The tile of `rows` rows and `panels` panels, found at run time.
template <typename Kernel, int R = 1>
void tile_of(const Product& product, Place at, int rows, int panels) {
  if constexpr (R <= Kernel::kRows) {
    if (rows != R) return tile_of<Kernel, R + 1>(product, at, rows, panels);
    if constexpr (Kernel::kMaxPanels == 2 && 2 * R <= Kernel::kRows) {
      if (panels == 2) return Kernel::template tile<R, 2>(product, at);
    }
    for (const int64_t end = at.panel + panels; at.panel < end; ++at.panel) Kernel::template tile<R, 1>(product, at);
  }
}

// The first row of a block; blocks end at whole tiles.
template <typename Kernel>
int64_t block_start(const Product& product, int64_t block) {
  const int64_t blocks = product_blocks(product), row = product.rows * block / blocks;
  return block < blocks ? row - row % Kernel::kRows : product.rows;
}

// The rows of a block are cut into tiles of equal height; a panel stays in the cache while the tiles pass by.
template <typename Kernel>
void multiply(const Product& product, int64_t first, int64_t last, ProductScratch& scratch) {
  const int64_t panels = product.weight.panels();
  for (int64_t item = first; item < last;) {
    const int64_t block = item / panels;
    const int64_t top = block_start<Kernel>(product, block), rows = block_start<Kernel>(product, block + 1) - top;
    const int64_t tiles = (rows + Kernel::kRows - 1) / Kernel::kRows;
    if (block != scratch.block) Kernel::begin(product, top, top + rows, scratch.sums);
    scratch.block = block;
    Place at{top, top, item % panels, tiles == 1, scratch.sums};
    const int wide = at.alone && at.panel + 1 < panels && item + 1 < last ? 2 : 1;
    for (int64_t t = 0; t < tiles; ++t) {
      at.row = top + rows * t / tiles;
      tile_of<Kernel>(product, at, static_cast<int>(top + rows * (t + 1) / tiles - at.row), wide);
    }
    item += wide;
  }
}

}  // namespace pagedkv::PAGEDKV_LANES
