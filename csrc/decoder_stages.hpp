// Work in stages that a team of threads does together.
//
// A stage is a number of items. Whoever is free takes the next ones, and the stage has ended when all items are done,
// not when all threads have come by. So a thread that the system has put aside holds up the others only with the
// items in its hands; with a barrier per stage, some 200 of them a step, a busy machine made a step many times slower
// (docs/log.md, Products). Who does an item never enters its result.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

namespace pagedkv {

class Stages {
 public:
  // Before the team starts: room for `count` stages.
  void reset(int64_t count) {
    if (count > size_) {
      stages_ = std::make_unique<Stage[]>(static_cast<size_t>(count));
      size_ = count;
    }
    for (int64_t i = 0; i < count; ++i) {
      stages_[i].next.store(0, std::memory_order_relaxed);
      stages_[i].done.store(0, std::memory_order_relaxed);
    }
  }

  // Stage number `at`, which every thread of the team runs with equal arguments: work(first, last) for runs of at most
  // `step` items. Returns when all are done, and what they wrote is seen.
  template <typename Work>
  void run(int64_t at, int64_t items, int64_t step, Work work) {
    Stage& stage = stages_[at];
    int64_t mine = 0;
    for (int64_t first; (first = stage.next.fetch_add(step, std::memory_order_relaxed)) < items;) {
      const int64_t last = first + step < items ? first + step : items;
      work(first, last);
      mine += last - first;
    }
    if (mine) stage.done.fetch_add(mine, std::memory_order_acq_rel);
    for (int spins = 0; stage.done.load(std::memory_order_acquire) < items; ++spins)
      if (spins >= kSpins) std::this_thread::yield();
  }

 private:
  static constexpr int kSpins = 20000;  // tens of microseconds: longer than any stage should wait on an idle machine

  struct alignas(64) Stage {
    std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int64_t> done{0};
  };
  std::unique_ptr<Stage[]> stages_;
  int64_t size_ = 0;
};

}  // namespace pagedkv
