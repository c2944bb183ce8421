// The rows of the next tile on their way to the second-level cache, a few at a time between the instructions of this
// tile: a burst would fill the queue of misses and stall. (Into the first level it is half as fast: fewer misses may be
// outstanding there.)
#pragma once
#include "attention.hpp"

namespace pagedkv::PAGEDKV_NS {

// Slots of one block that follow each other: where they begin in the item's first KV head.
struct Span {
  int first;  // in the tile
  int count;
  const char* begin[4];  // keys, values, and their scales, or nullptr
};

// How far it is from one KV head to the next in each of the four, and how many bytes a slot has. Of all spans alike.
struct SpanStrides {
  int64_t head[4];
  int64_t slot[4];
  int64_t slot_bytes[4];
};

// Walks through whole blocks: the keys of all heads, their values, the scales of both. In a pool of the plain order
// that is one long run of memory.
class Ahead {
 public:
  void begin(const Span* spans, int num_spans, int num_heads, const SpanStrides& strides) {
    span_ = spans - 1;
    last_ = spans + num_spans;
    num_heads_ = num_heads;
    strides_ = &strides;
    part_ = 3;
    head_ = num_heads;
    next_run();
  }
  void end() { span_ = last_; }

  inline void step() {  // two lines
    if (span_ == last_) return;
    prefetch(at_);
    if (stop_ - at_ > 64) prefetch(at_ + 64);
    at_ += 128;
    if (at_ >= stop_) next_run();
  }

 private:
  void next_run() {
    at_ = nullptr;
    while (true) {
      if (++head_ >= num_heads_) {
        head_ = 0;
        if (++part_ == 4) {
          part_ = 0;
          if (++span_ == last_) return;
        }
      }
      if (span_->begin[part_] != nullptr) break;
    }
    at_ = span_->begin[part_] + head_ * strides_->head[part_];
    stop_ = at_ + (span_->count - 1) * strides_->slot[part_] + strides_->slot_bytes[part_];
  }

  const Span* span_ = nullptr;
  const Span* last_ = nullptr;
  const SpanStrides* strides_ = nullptr;
  const char* at_ = nullptr;
  const char* stop_ = nullptr;
  int num_heads_ = 0, head_ = 0, part_ = 0;
};

}  // namespace pagedkv::PAGEDKV_NS
