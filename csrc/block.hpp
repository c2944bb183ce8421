// Where a position lives: the block addressing that every kernel uses.
#pragma once
#include <cstdint>

namespace pagedkv {

struct Slot {
  int64_t block;
  int64_t offset;
};

// Position p of a sequence lives in block table[p / block_size] at offset p % block_size.
inline Slot physical_slot(const int32_t* table, int64_t position, int64_t block_size) {
  return {table[position / block_size], position % block_size};
}

}  // namespace pagedkv
