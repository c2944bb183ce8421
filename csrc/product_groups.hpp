// Products with weights of four and eight bits (see product.hpp for their order in memory).
//
// The integers become what the dot product takes on their way from memory into registers, once per tile of rows: bf16,
// or floats where there is no dot product of bf16. Where that takes several instructions a dot product and many tiles
// meet the panel, it is widened once, into the scratch. (With AVX-512 four bits take one permute, and the scratch was
// slower at every number of rows: docs/log.md, Products.) The scratch holds a widened panel and, behind it, for kinds
// with an offset, the sums of x over each group of the rows of a block.
#pragma once
#include "product_kernel.hpp"

namespace pagedkv::PAGEDKV_NS {

template <WeightKind kind>
struct Groups {
  static constexpr int kRows = kGroupTileRows;
  static constexpr int kMaxPanels = 1;
  static constexpr bool kOffset = kind == WeightKind::int4_offset;
  static constexpr int kLeast = kind == WeightKind::int4 ? -8 : 0;  // what four bits of zeros stand for
  static constexpr bool kWidens = kind == WeightKind::int8 || kFloatPairs;

  // Sums of x over each group, for rows top .. bottom.
  static void begin(const Product& product, int64_t top, int64_t bottom, float* scratch) {
    if (!kOffset) return;
    float* sums = scratch + sums_at(product.weight);
    for (int64_t row = top; row < bottom; ++row) {
      const uint16_t* x = static_cast<const uint16_t*>(product.x) + row * product.stride;
      for (int64_t k = 0; k < product.weight.depth; k += kGroup)
        *sums++ = sum(add(load_bf16(x + k), load_bf16(x + k + 16)));
    }
  }

  // A panel into the scratch: [K/32][16 pairs][32 columns].
  static void widen(const Weight& weight, int64_t panel, float* scratch) {
    if constexpr (kWidens) {
      const NibbleTable table = nibble_table(kLeast);
      const uint8_t* group = weight.data + panel * weight.panel_bytes();
      uint16_t* to = reinterpret_cast<uint16_t*>(scratch);
      for (int64_t g = 0; g < weight.depth / kGroup; ++g, group += group_bytes(kind))
        for (int j = 0; j < kGroup / 2; ++j)
          for (int h = 0; h < 2; ++h, to += 32) store_pairs(to, pairs(group, j, h, table));
    }
  }

  template <int R, int P>
  static void tile(const Product& product, const Place& at) {
    static_assert(P == 1, "one panel at a time");
    if constexpr (kWidens) {
      if (at.tiles >= kWorthWidening) return run<R, true>(product, at);
    }
    run<R, false>(product, at);
  }

 private:
  template <int R, bool kWide>
  static void run(const Product& product, const Place& at) {
    const Weight& weight = product.weight;
    const NibbleTable table = nibble_table(kLeast);
    const int64_t groups = weight.depth / kGroup;
    const uint16_t* x = static_cast<const uint16_t*>(product.x) + at.row * product.stride;
    const float* sums = at.scratch + sums_at(weight) + (at.row - at.top) * groups;
    const uint8_t* group = weight.data + at.panel * weight.panel_bytes();
    const uint16_t* wide = reinterpret_cast<const uint16_t*>(at.scratch);
    Lanes acc[R][2];
    for (auto& of_row : acc) of_row[0] = of_row[1] = zero();
    Fetch fetch = fetch_of(weight, at, group_bytes(kind));
    Output out(product.tail, at.row, R, at.panel, 1);
    for (int64_t g = 0; g < groups; ++g, group += group_bytes(kind), x += kGroup) {
      out.fetch_some();
      for (int64_t line = 0; line < fetch.pace; line += 64) __builtin_prefetch(fetch.at + line);
      fetch.at += fetch.pace;
      Lanes part[R][2];
      for (auto& of_row : part) of_row[0] = of_row[1] = zero();
#pragma GCC unroll 16
      for (int j = 0; j < kGroup / 2; ++j) {
        const auto low = weights_of<kWide>(wide, group, j, 0, table);
        const auto high = weights_of<kWide>(wide, group, j, 1, table);
        wide += 64;
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const uint32_t pair = Step<uint16_t>::value(x + r * product.stride + 2 * j);
          part[r][0] = dot(part[r][0], low, pair);
          part[r][1] = dot(part[r][1], high, pair);
        }
      }
      const auto* factors = reinterpret_cast<const uint16_t*>(group + integer_bytes(kind));
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const Lanes factor = load_f16(factors + 16 * h);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) acc[r][h] = fma(part[r][h], factor, acc[r][h]);
        if constexpr (kOffset) {
          const Lanes offset = load_f16(factors + kPanel + 16 * h);
#pragma GCC unroll 12
          for (int r = 0; r < R; ++r) acc[r][h] = fma(broadcast(sums[r * groups + g]), offset, acc[r][h]);
        }
      }
    }
    finish(product, acc, 0, at.row, at.panel);
  }

  // Pair j of half h of a group, as a dot product takes it.
  template <bool kWide>
  static auto weights_of(const uint16_t* wide, const uint8_t* group, int j, int h, const NibbleTable& table) {
    if constexpr (kWide) return load_pairs(wide + 32 * h);
    else if constexpr (kFloatPairs) return floats(group, j, h);
    else return pairs(group, j, h, table);
  }
  static FloatPairs floats(const uint8_t* group, int j, int h) {
    if constexpr (kind == WeightKind::int8)
      return bytes_as_floats(reinterpret_cast<const int8_t*>(group) + (h * 16 + j) * 32);
    FloatPairs values = nibbles_as_floats(group + h * 256 + j / 4 * 64, j % 4);
    if constexpr (kLeast != 0) {
      values.even = add(values.even, broadcast(kLeast));
      values.odd = add(values.odd, broadcast(kLeast));
    }
    return values;
  }
  static Pairs pairs(const uint8_t* group, int j, int h, const NibbleTable& table) {
    if constexpr (kind == WeightKind::int8) return bytes(reinterpret_cast<const int8_t*>(group) + (h * 16 + j) * 32);
    return nibbles(group + h * 256 + j / 4 * 64, j % 4, table);
  }
};

}  // namespace pagedkv::PAGEDKV_NS
