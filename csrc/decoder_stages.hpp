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
  // Before the team of `threads` starts: room for `count` stages.
  void reset(int64_t count, int threads) {
    threads_ = threads;
    if (count * (threads + 1) > size_) {
      size_ = count * (threads + 1);
      counters_ = std::make_unique<Counter[]>(static_cast<size_t>(size_));
    }
    for (int64_t i = 0; i < count * (threads + 1); ++i) counters_[i].value.store(0, std::memory_order_relaxed);
  }

  // Stage number `at`, which every thread of the team runs with equal arguments: work(first, last) for runs of at most
  // `step` items. Returns when all are done, and what they wrote is seen.
  //
  // A thread begins with its share of the items and then helps the others with theirs. Where items are rows of tokens,
  // a thread so meets the rows that it wrote in the stage before, in its own cache.
  template <typename Work>
  void run_shares(int64_t at, int thread, int64_t items, int64_t step, Work work) {
    int64_t mine = 0;
    for (int i = 0; i < threads_; ++i) {
      const int owner = (thread + i) % threads_;
      const int64_t begin = items * owner / threads_, end = items * (owner + 1) / threads_;
      mine += take(counter(at, owner), begin, end, step, work);
    }
    finish(at, mine, items);
  }

  // The same with one queue for all: items in the order of their numbers.
  template <typename Work>
  void run_queue(int64_t at, int64_t items, int64_t step, Work work) {
    finish(at, take(counter(at, 0), 0, items, step, work), items);
  }

 private:
  static constexpr int kSpins = 20000;  // tens of microseconds: longer than any stage should wait on an idle machine

  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };

  // Of a stage: how far each thread's share is taken, and how many items are done.
  std::atomic<int64_t>& counter(int64_t at, int place) { return counters_[at * (threads_ + 1) + place].value; }

  template <typename Work>
  static int64_t take(std::atomic<int64_t>& next, int64_t begin, int64_t end, int64_t step, Work& work) {
    int64_t taken = 0;
    for (int64_t first; (first = begin + next.fetch_add(step, std::memory_order_relaxed)) < end;) {
      const int64_t last = first + step < end ? first + step : end;
      work(first, last);
      taken += last - first;
    }
    return taken;
  }

  void finish(int64_t at, int64_t mine, int64_t items) {
    std::atomic<int64_t>& done = counter(at, threads_);
    if (mine) done.fetch_add(mine, std::memory_order_acq_rel);
    for (int spins = 0; done.load(std::memory_order_acquire) < items; ++spins)
      if (spins >= kSpins) std::this_thread::yield();
  }

  int threads_ = 1;
  std::unique_ptr<Counter[]> counters_;
  int64_t size_ = 0;
};

}  // namespace pagedkv
