// The rows of the next tile on their way to the cache, a few at a time between the instructions of this tile: a burst
// would fill the queue of misses and stall. Which level of the cache is a matter of the processor (isa.hpp).
#pragma once
#include "attention.hpp"
#include "isa.hpp"

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
// that is one long run of memory a block.
class Ahead {
 public:
  void begin(const Span* spans, int num_spans, int num_heads, const SpanStrides& strides) {
    end();
    for (const Span* span = spans; span < spans + num_spans; ++span)
      for (int part = 0; part < 4; ++part) {
        const int64_t bytes = (span->count - 1) * strides.slot[part] + strides.slot_bytes[part];
        for (int head = 0; head < num_heads && span->begin[part] != nullptr; ++head)
          add(span->begin[part] + head * strides.head[part], bytes);
      }
    run_ = runs_;
    at_ = run_->begin;
  }
  void end() { run_ = end_ = runs_; }

  // Two lines. No call and no loop in here: it stands between instructions that keep all registers busy.
  inline void step() {
    if (run_ == end_) return;
    if (near_) {
      prefetch_near(at_);
      prefetch_near(at_ + 64);
    } else {
      prefetch(at_);
      prefetch(at_ + 64);
    }
    at_ += 128;
    if (at_ < run_->stop) return;
    ++run_;
    at_ = run_->begin;
  }

 private:
  struct Run {
    const char* begin;
    const char* stop;
  };
  static constexpr int kMaxRuns = 4 * kTile;  // more are left to come when they are needed

  void add(const char* begin, int64_t bytes) {
    if (end_ > runs_ && end_[-1].stop == begin) end_[-1].stop += bytes;
    else if (end_ < runs_ + kMaxRuns) *end_++ = {begin, begin + bytes};
  }

  Run runs_[kMaxRuns + 1];
  Run *run_ = runs_, *end_ = runs_;
  const char* at_ = nullptr;
  const bool near_ = prefetches_near();
};

}  // namespace pagedkv::PAGEDKV_NS
