// Where the rows of a tile lie, and their scales.
#pragma once
#include "attention_ahead.hpp"
#include "block.hpp"

namespace pagedkv::PAGEDKV_NS {

template <class T, bool Scaled>
struct TileRows {
  // The tile at `slot` of an item, through its table: its spans, as long as one block is. Slots outside what its tokens
  // see get the row of zeros, and scale 0.
  void find(const AttentionPlan& plan, const AttentionArgs& args, const WorkItem& item, int slot, const float* zeros) {
    const TokenTile& tile = plan.tiles[item.tile];
    const int block_size = plan.batch.block_size;
    first_head = item.first_head;
    num_spans = 0;
    seen = SlotRange{0, kTile}.within(tile.first_slot - slot, tile.last_slot - slot);
    int s = 0;
    for (; s < kTile && slot + s < tile.first_slot; ++s) set(s, zeros);
    while (s < kTile && slot + s < tile.last_slot) {
      const Slot from = physical_slot(tile.table, slot + s, block_size);
      int count = static_cast<int>(block_size - from.offset);
      if (count > kTile - s) count = kTile - s;
      if (count > tile.last_slot - slot - s) count = tile.last_slot - slot - s;
      spans[num_spans++] = {s, count,
                            {row_of(args.k, from, first_head), row_of(args.v, from, first_head),
                             scale_of(args.k, from, first_head), scale_of(args.v, from, first_head)}};
      s += count;
    }
    for (; s < kTile; ++s) set(s, zeros);
  }

  // The rows of one KV head of the tile, and their scales: read only now that the tile's turn has come.
  void point(const SpanStrides& strides, int head) {
    const int64_t heads = head - first_head;
    for (const Span* span = spans; span < spans + num_spans; ++span)
      for (int side = 0; side < 2; ++side) {
        const int count = span->count;
        const char* row = span->begin[side] + heads * strides.head[side];
        const T** to = rows + side * kTile + span->first;
        for (int64_t i = 0, stride = strides.slot[side]; i < count; ++i, row += stride)
          to[i] = reinterpret_cast<const T*>(row);
        if constexpr (Scaled) {
          const char* scale = span->begin[2 + side] + heads * strides.head[2 + side];
          float* scales = (side == 0 ? key_scale : value_scale) + span->first;
          const int64_t stride = strides.slot[2 + side];
          if (stride == sizeof(float)) __builtin_memcpy(scales, scale, count * sizeof(float));
          else
            for (int i = 0; i < count; ++i, scale += stride) __builtin_memcpy(scales + i, scale, sizeof(float));
        }
      }
  }

  static SpanStrides strides_of(const AttentionArgs& args, int head_dim) {
    constexpr int64_t kNumber = sizeof(T), kScale = Scaled ? sizeof(float) : 0;
    return {{args.k.head_stride * kNumber, args.v.head_stride * kNumber, args.k.scale_head_stride * kScale,
             args.v.scale_head_stride * kScale},
            {args.k.slot_stride * kNumber, args.v.slot_stride * kNumber, args.k.scale_slot_stride * kScale,
             args.v.scale_slot_stride * kScale},
            {head_dim * kNumber, head_dim * kNumber, kScale, kScale}};
  }

  const T* rows[2 * kTile];  // keys, then values
  float key_scale[Scaled ? kTile : 1];
  float value_scale[Scaled ? kTile : 1];
  SlotRange seen;  // by any of the item's tokens
  Span spans[kTile];
  int num_spans = 0, first_head = 0;

 private:
  void set(int s, const float* zeros) {
    rows[s] = rows[kTile + s] = reinterpret_cast<const T*>(zeros);
    if constexpr (Scaled) key_scale[s] = value_scale[s] = 0.0f;
  }
  static const char* row_of(const PoolView& pool, const Slot& from, int64_t head) {
    return reinterpret_cast<const char*>(static_cast<const T*>(pool.data) + from.block * pool.block_stride +
                                         head * pool.head_stride + from.offset * pool.slot_stride);
  }
  static const char* scale_of(const PoolView& pool, const Slot& from, int64_t head) {
    if constexpr (!Scaled) return nullptr;
    return reinterpret_cast<const char*>(pool.scales + from.block * pool.scale_block_stride +
                                         head * pool.scale_head_stride + from.offset * pool.scale_slot_stride);
  }
};

}  // namespace pagedkv::PAGEDKV_NS
