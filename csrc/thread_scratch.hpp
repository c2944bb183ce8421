// One thread's working memory, kept between calls: fresh pages at every call would cost more than the call's start.
#pragma once
#include <cstdint>
#include <cstdlib>

namespace pagedkv {

class ThreadScratch {
 public:
  ThreadScratch() = default;
  ThreadScratch(const ThreadScratch&) = delete;
  ThreadScratch& operator=(const ThreadScratch&) = delete;
  ~ThreadScratch() { std::free(data_); }

  // At least `bytes`, a multiple of 64, aligned to 64; what was in it may be lost.
  void* get(int64_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      data_ = std::aligned_alloc(64, static_cast<size_t>(bytes));
      size_ = bytes;
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace pagedkv
