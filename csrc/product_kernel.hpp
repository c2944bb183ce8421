// The tiles of product.hpp, written over Lanes; included once per instruction set.
#pragma once
#include <cstring>
#include <type_traits>

#include "elementwise_math.hpp"
#include "product.hpp"

namespace pagedkv::PAGEDKV_NS {

constexpr int kWorthWidening = 6;       // tiles that meet a panel of integers
constexpr int64_t kAheadBytes = 2048;  // of prefetch, for the memory-bound case: few rows

// What a step of the sum needs: 4 bytes of x in each row (a pair of bf16, or one float32) and 64 bytes of a half panel.
template <typename T>
struct Step {  // bf16
  using Columns = Pairs;
  static Columns columns(const uint8_t* at) { return load_pairs(reinterpret_cast<const uint16_t*>(at)); }
  static uint32_t value(const uint16_t* x) {
    uint32_t pair;
    std::memcpy(&pair, x, 4);
    return pair;
  }
  static Lanes add_product(Lanes acc, Columns w, uint32_t x) { return dot(acc, w, x); }
};
template <>
struct Step<float> {
  using Columns = Lanes;
  static Columns columns(const uint8_t* at) { return load_lanes(reinterpret_cast<const float*>(at)); }
  static Lanes value(const float* x) { return broadcast(*x); }
  static Lanes add_product(Lanes acc, Columns w, Lanes x) { return fma(x, w, acc); }
};

// R rows of x that are read side by side. Every third row has a pointer of its own, so that addresses are a pointer
// and once or twice the stride: with a register for each row there are too few, and moves of spilled ones take the
// place of products.
template <int R, typename T>
struct Rows {
  Rows(const T* x, int64_t stride) : stride_(stride) {
#pragma GCC unroll 4
    for (int i = 0; i < kPointers; ++i) {
      pointer_[i] = x + 3 * i * stride;
#if defined(__GNUC__)
      asm("" : "+r"(pointer_[i]));  // the compiler would see that one follows from another, and use R registers
#endif
    }
  }
  const T* operator[](int row) const { return pointer_[row / 3] + row % 3 * stride_; }
  void advance(int64_t k) {
#pragma GCC unroll 4
    for (const T*& pointer : pointer_) pointer += k;
  }

 private:
  static constexpr int kPointers = (R + 2) / 3;
  const T* pointer_[kPointers];
  int64_t stride_;
};

inline int lanes_left(int64_t columns) { return static_cast<int>(columns < 0 ? 0 : columns > 16 ? 16 : columns); }

// Where one row of a panel begins in the output.
inline void* target(const Tail& tail, int64_t row, int64_t panel) {
  const int64_t at = row * tail.stride + panel * (tail.kind == TailKind::silu_mul ? kPanel / 2 : kPanel);
  return static_cast<char*>(tail.out) + at * (tail.bf16 ? 2 : 4);
}

// The output of a tile, asked for row by row while its products run: rows lie far apart, stores that miss the cache
// would hold up the next tile, and all of them asked for at once hold up the loads of this one.
constexpr int kFetchRows = 3;    // of the output, at a time
constexpr int kFetchSteps = 64;  // between two times
class Output {
 public:
  Output(const Tail& tail, int64_t row, int rows, int64_t panel, int panels)
      : next_(static_cast<const char*>(target(tail, row, panel))),
        stride_(tail.stride * (tail.bf16 ? 2 : 4)),
        rows_(rows),
        bytes_(panels * (tail.kind == TailKind::silu_mul ? kPanel / 2 : kPanel) * (tail.bf16 ? 2 : 4)) {}

  void fetch_some() {
    const int some = rows_ < kFetchRows ? rows_ : kFetchRows;
    for (int i = 0; i < some; ++i, next_ += stride_)
      for (int64_t line = 0; line < bytes_; line += 64) __builtin_prefetch(next_ + line, 1);
    rows_ -= some;
  }

 private:
  const char* next_;
  int64_t stride_;
  int rows_;
  int64_t bytes_;
};

// What a tile fetches while its products run: from `at` on, `pace` bytes a step.
struct Fetch {
  const uint8_t* at;
  int64_t pace;
};

// acc[r][2 p + h] over all of K: R rows, P panels, halves of 16 columns. w is the first panel. This and what finishes a
// tile must be inlined: handed to a call, the accumulators would live in memory.
template <int R, int P, typename T>
[[gnu::always_inline]] inline void accumulate(Lanes (&acc)[R][2 * P], const T* x, int64_t stride, const Weight& weight,
                                              const uint8_t* w, Fetch fetch, Output out) {
  constexpr int kStep = 4 / sizeof(T);
  const int64_t panel = weight.panel_bytes();
  Rows<R, T> rows(x, stride);
  for (int steps = weight.depth / kStep; steps > 0; steps -= kFetchSteps) {
    out.fetch_some();
    const uint8_t* const end = w + (steps < kFetchSteps ? steps : kFetchSteps) * int64_t{4} * kPanel;
#pragma GCC unroll 1
    for (; w != end; w += 4 * kPanel, rows.advance(kStep)) {
      typename Step<T>::Columns columns[2 * P];
#pragma GCC unroll 4
      for (int c = 0; c < 2 * P; ++c) {
        const int64_t at = c / 2 * panel + c % 2 * 64;
        __builtin_prefetch(fetch.at + at);
        columns[c] = Step<T>::columns(w + at);
      }
      fetch.at += fetch.pace;
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const auto value = Step<T>::value(rows[r]);
#pragma GCC unroll 4
        for (int c = 0; c < 2 * P; ++c) acc[r][c] = Step<T>::add_product(acc[r][c], columns[c], value);
      }
    }
  }
  if (weight.depth % kStep == 0) return;
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)  // an odd K in bf16: the last one has no partner
#pragma GCC unroll 4
    for (int c = 0; c < 2 * P; ++c)
      acc[r][c] = dot(acc[r][c], load_pairs(reinterpret_cast<const uint16_t*>(w + c / 2 * panel + c % 2 * 64)),
                      static_cast<uint32_t>(*rows[r]));
}

template <TailKind kind>
inline void put(void* out, bool bf16, Lanes v) {
  if (bf16) return store_bf16(static_cast<uint16_t*>(out), v);
  float* at = static_cast<float*>(out);
  store(at, kind == TailKind::add ? add(load_lanes(at), v) : v);
}

template <TailKind kind>
inline void put_first(void* out, bool bf16, Lanes v, int count) {
  if (count <= 0) return;
  if (bf16) return store_bf16_first(static_cast<uint16_t*>(out), v, count);
  float* at = static_cast<float*>(out);
  store_first(at, kind == TailKind::add ? add(load_first_lanes(at, count), v) : v, count);
}

template <TailKind kind, int R, int C>
[[gnu::always_inline]] inline void finish_kind(const Tail& tail, Lanes (&acc)[R][C], int c, int64_t row,
                                               int64_t panel) {
  char* out = static_cast<char*>(target(tail, row, panel));
  const int64_t stride = tail.stride * (tail.bf16 ? 2 : 4), half = 16 * (tail.bf16 ? 2 : 4);  // bytes
  const int width = kind == TailKind::silu_mul ? 16 : 32;
  const int64_t left = tail.columns - panel * width;
  if (left >= width) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r, out += stride) {
      if constexpr (kind == TailKind::silu_mul) {
        put<kind>(out, tail.bf16, mul(silu(acc[r][c]), acc[r][c + 1]));
      } else {
        put<kind>(out, tail.bf16, acc[r][c]);
        put<kind>(out + half, tail.bf16, acc[r][c + 1]);
      }
    }
    return;
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r, out += stride) {
    if constexpr (kind == TailKind::silu_mul) {
      put_first<kind>(out, tail.bf16, mul(silu(acc[r][c]), acc[r][c + 1]), lanes_left(left));
    } else {
      put_first<kind>(out, tail.bf16, acc[r][c], lanes_left(left));
      put_first<kind>(out + half, tail.bf16, acc[r][c + 1], lanes_left(left - 16));
    }
  }
}

// Bias and tail of panel `panel`, whose halves are acc[r][c] and acc[r][c + 1].
template <int R, int C>
[[gnu::always_inline]] inline void finish(const Product& product, Lanes (&acc)[R][C], int c, int64_t row,
                                          int64_t panel) {
  const Tail& tail = product.tail;
  if (tail.bias) {
    const int64_t column = panel * kPanel, left = product.weight.columns - column;
    const Lanes low = load_first_lanes(tail.bias + column, lanes_left(left));
    const Lanes high = left > 16 ? load_first_lanes(tail.bias + column + 16, lanes_left(left - 16)) : zero();
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      acc[r][c] = add(acc[r][c], low);
      acc[r][c + 1] = add(acc[r][c + 1], high);
    }
  }
  switch (tail.kind) {
    case TailKind::store: return finish_kind<TailKind::store>(tail, acc, c, row, panel);
    case TailKind::add: return finish_kind<TailKind::add>(tail, acc, c, row, panel);
    case TailKind::silu_mul: return finish_kind<TailKind::silu_mul>(tail, acc, c, row, panel);
  }
}

// One tile's place: its rows start at `row`, in the block of rows that starts at `top`; it is number `tile` of the
// `tiles` that the panel meets.
struct Place {
  int64_t row, top, panel, tile, tiles;
  const float* scratch;
};

// The only tile of its panel takes it from memory and fetches what comes soon. Else the panel is in the cache, and each
// tile fetches its part of the next: one tile alone would wait for all of it.
inline Fetch fetch_of(const Weight& weight, const Place& at, int64_t step_bytes) {
  const uint8_t* panel = weight.data + at.panel * weight.panel_bytes();
  if (at.tiles == 1) return {panel + kAheadBytes, step_bytes};
  return {panel + weight.panel_bytes() * (at.tiles + at.tile) / at.tiles, (step_bytes + at.tiles - 1) / at.tiles};
}

template <typename T>
struct Dense {
  static constexpr int kRows = kTileRows;
  static constexpr int kMaxPanels = 2;

  template <int R, int P>
  static void tile(const Product& product, const Place& at) {
    const Weight& weight = product.weight;
    Lanes acc[R][2 * P];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < 2 * P; ++c) acc[r][c] = zero();
    accumulate<R, P>(acc, static_cast<const T*>(product.x) + at.row * product.stride, product.stride, weight,
                     weight.data + at.panel * weight.panel_bytes(), fetch_of(weight, at, 4 * kPanel),
                     {product.tail, at.row, R, at.panel, P});
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) finish(product, acc, 2 * p, at.row, at.panel + p);
  }

  static constexpr bool kWidens = false;
  static void begin(const Product&, int64_t, int64_t, float*) {}
  static void widen(const Weight&, int64_t, float*) {}
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
    if (block != scratch.block) Kernel::begin(product, top, top + rows, scratch.data);
    scratch.block = block;
    Place at{top, top, item % panels, 0, tiles, scratch.data};
    if (Kernel::kWidens && tiles >= kWorthWidening) Kernel::widen(product.weight, at.panel, scratch.data);
    const int wide = tiles == 1 && at.panel + 1 < panels && item + 1 < last ? 2 : 1;
    for (; at.tile < tiles; ++at.tile) {
      at.row = top + rows * at.tile / tiles;
      tile_of<Kernel>(product, at, static_cast<int>(top + rows * (at.tile + 1) / tiles - at.row), wide);
    }
    item += wide;
  }
}

}  // namespace pagedkv::PAGEDKV_NS
