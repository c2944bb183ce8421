#include "product_pack.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "numbers.hpp"

namespace pagedkv {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kRunBytes = int64_t{64} << 20;

int64_t column_of(Place place, int64_t first, int64_t row) {
  row += first;
  if (place == Place::straight) return row;
  return row / 16 * kPanel + row % 16 + (place == Place::up ? 16 : 0);
}

// Where the integers of (k, lane of a half panel) lie inside a group: byte, and for nibbles the bit within a word.
struct Spot {
  int64_t byte;
  int shift;
};
Spot nibble_spot(int column, int k) {
  const int half = column / 16, lane = column % 16, within = k % 8;
  // the low half of a lane's word holds the even k of a quad of pairs, the high half the odd ones
  return {half * 256 + k / 8 * 64 + lane * 4, within / 2 * 4 + within % 2 * 16};
}
int64_t byte_spot(int column, int k) {
  return (column / 16 * 16 + k / 2) * 32 + column % 16 * 2 + k % 2;
}

float read_one(const void* source, DType dtype, int64_t at) {
  if (dtype == DType::f32) return static_cast<const float*>(source)[at];
  if (dtype == DType::bf16) return widen(static_cast<const bfloat_t*>(source)[at]);
  return widen(static_cast<const half_t*>(source)[at]);
}

template <typename T, typename Read>
void put_column(uint8_t* panel, int64_t lane, int64_t depth, Read read) {
  T* to = reinterpret_cast<T*>(panel);
  for (int64_t k = 0; k < depth; ++k) {
    if constexpr (sizeof(T) == 4)
      to[k * kPanel + lane] = read(k);
    else
      narrow(read(k), to[k / 2 * 2 * kPanel + lane * 2 + k % 2]);
  }
}

}  // namespace

WeightArena::~WeightArena() {
  for (const Run& run : runs_) munmap(run.data, static_cast<size_t>(run.size));
}

uint8_t* WeightArena::take(int64_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  if (runs_.empty() || used_ + bytes > runs_.back().size) {
    const int64_t size = (std::max(bytes, kRunBytes) + kHugePage - 1) / kHugePage * kHugePage;
    // one page more than needed, cut back so that the run starts on a huge page
    auto* raw = static_cast<uint8_t*>(mmap(nullptr, static_cast<size_t>(size + kHugePage), PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (raw == MAP_FAILED) throw std::bad_alloc();
    const auto address = reinterpret_cast<uintptr_t>(raw);
    const auto before = static_cast<int64_t>((kHugePage - address % kHugePage) % kHugePage);
    if (before) munmap(raw, static_cast<size_t>(before));
    if (before < kHugePage) munmap(raw + before + size, static_cast<size_t>(kHugePage - before));
#if defined(MADV_HUGEPAGE)
    madvise(raw + before, static_cast<size_t>(size), MADV_HUGEPAGE);  // advice: without it, small pages serve
#endif
    runs_.push_back({raw + before, size});
    used_ = 0;
  }
  uint8_t* at = runs_.back().data + used_;
  used_ += bytes;
  return at;
}

PackedWeight::PackedWeight(std::shared_ptr<WeightArena> arena, WeightKind kind, int64_t columns, int64_t depth)
    : arena_(std::move(arena)) {
  if (columns < 1 || depth < 1 || columns > INT32_MAX - kPanel || depth > INT32_MAX - kGroup)
    throw std::invalid_argument("a weight of " + std::to_string(columns) + " x " + std::to_string(depth));
  if (kind != WeightKind::f32 && kind != WeightKind::bf16 && depth % kGroup)
    throw std::invalid_argument("in_features is " + std::to_string(depth) + ", not a multiple of the group size " +
                                std::to_string(kGroup));
  weight_.kind = kind;
  weight_.columns = static_cast<int32_t>(columns);
  weight_.depth = static_cast<int32_t>(depth);
  weight_.data = arena_->take(weight_.bytes());
}

void PackedWeight::check(int64_t rows, Place place, int64_t first) const {
  if (rows < 1 || first < 0 || column_of(place, first, rows - 1) >= weight_.columns)
    throw std::invalid_argument(std::to_string(rows) + " rows do not fit into " + std::to_string(weight_.columns) +
                                " columns");
}

void PackedWeight::put_dense(const void* source, DType dtype, int64_t rows, Place place, int64_t first) {
  check(rows, place, first);
  if (weight_.kind != WeightKind::f32 && weight_.kind != WeightKind::bf16)
    throw std::invalid_argument("the weight holds integers");
  const int64_t depth = weight_.depth;
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t column = column_of(place, first, row);
    uint8_t* panel = weight_.data + column / kPanel * weight_.panel_bytes();
    const auto read = [=](int64_t k) { return read_one(source, dtype, row * depth + k); };
    if (weight_.kind == WeightKind::f32)
      put_column<float>(panel, column % kPanel, depth, read);
    else
      put_column<bfloat_t>(panel, column % kPanel, depth, read);
  }
}

void PackedWeight::put_groups(const uint8_t* values, const uint16_t* factors, const uint16_t* offsets, int64_t rows,
                              Place place, int64_t first) {
  check(rows, place, first);
  const WeightKind kind = weight_.kind;
  if (kind == WeightKind::f32 || kind == WeightKind::bf16) throw std::invalid_argument("the weight is not of integers");
  if ((offsets != nullptr) != (kind == WeightKind::int4_offset))
    throw std::invalid_argument("offsets belong to the kind int4_offset, and to it alone");
  const int64_t groups = weight_.depth / kGroup;
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t column = column_of(place, first, row);
    const int lane = static_cast<int>(column % kPanel);
    uint8_t* group = weight_.data + column / kPanel * weight_.panel_bytes();
    const uint8_t* from = values + row * weight_.depth;
    for (int64_t g = 0; g < groups; ++g, group += group_bytes(kind), from += kGroup) {
      for (int k = 0; k < kGroup; ++k) {
        if (kind == WeightKind::int8) {
          group[byte_spot(lane, k)] = from[k];
          continue;
        }
        const Spot spot = nibble_spot(lane, k);
        uint32_t word;
        std::memcpy(&word, group + spot.byte, 4);
        word = (word & ~(15u << spot.shift)) | (static_cast<uint32_t>(from[k] & 15) << spot.shift);
        std::memcpy(group + spot.byte, &word, 4);
      }
      auto* scales = reinterpret_cast<uint16_t*>(group + integer_bytes(kind));
      scales[lane] = factors[row * groups + g];
      if (offsets) scales[kPanel + lane] = offsets[row * groups + g];
    }
  }
}

void read_column(const Weight& weight, int64_t column, float* out) {
  const uint8_t* panel = weight.data + column / kPanel * weight.panel_bytes();
  const int lane = static_cast<int>(column % kPanel);
  if (weight.kind == WeightKind::f32) {
    const auto* from = reinterpret_cast<const float*>(panel) + lane;
    for (int64_t k = 0; k < weight.depth; ++k) out[k] = from[k * kPanel];
    return;
  }
  if (weight.kind == WeightKind::bf16) {
    const auto* from = reinterpret_cast<const bfloat_t*>(panel) + lane * 2;
    for (int64_t k = 0; k < weight.depth; ++k) out[k] = widen(from[k / 2 * 2 * kPanel + k % 2]);
    return;
  }
  for (int64_t g = 0; g < weight.depth / kGroup; ++g, panel += group_bytes(weight.kind)) {
    const auto* scales = reinterpret_cast<const half_t*>(panel + integer_bytes(weight.kind));
    const float factor = widen(scales[lane]);
    const float offset = weight.kind == WeightKind::int4_offset ? widen(scales[kPanel + lane]) : 0.0f;
    for (int k = 0; k < kGroup; ++k) {
      int value;
      if (weight.kind == WeightKind::int8) {
        value = static_cast<int8_t>(panel[byte_spot(lane, k)]);
      } else {
        const Spot spot = nibble_spot(lane, k);
        uint32_t word;
        std::memcpy(&word, panel + spot.byte, 4);
        value = static_cast<int>(word >> spot.shift & 15u) - (weight.kind == WeightKind::int4 ? 8 : 0);
      }
      *out++ = static_cast<float>(value) * factor + offset;
    }
  }
}

}  // namespace pagedkv
