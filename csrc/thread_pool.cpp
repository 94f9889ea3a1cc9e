#include "thread_pool.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace rvllm {
namespace {

// Long enough to bridge the gap between two operations of a step, short enough not to burn an idle machine.
constexpr int kSpins = 20000;

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  // Spinning threads that share a core only keep the others from working.
  spins_ = num_threads <= int(std::thread::hardware_concurrency()) ? kSpins : 0;
  for (int i = 1; i < num_threads; ++i) workers_.emplace_back(&ThreadPool::work, this, i);
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_.store(true);
    generation_.fetch_add(1);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::take_ranges(int thread) {
  for (;;) {
    const int64_t begin = next_.fetch_add(grain_, std::memory_order_relaxed);
    if (begin >= count_) return;
    (*body_)(begin, std::min(begin + grain_, count_), thread);
  }
}

void ThreadPool::parallel_for(int64_t count, int64_t grain,
                              const std::function<void(int64_t, int64_t, int)>& body) {
  if (count <= 0) return;
  if (workers_.empty() || count <= grain) {
    for (int64_t begin = 0; begin < count; begin += grain) body(begin, std::min(begin + grain, count), 0);
    return;
  }
  body_ = &body;
  count_ = count;
  grain_ = grain;
  next_.store(0, std::memory_order_relaxed);
  busy_.store(int(workers_.size()), std::memory_order_relaxed);
  bool wake;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    generation_.fetch_add(1, std::memory_order_release);
    wake = sleepers_ > 0;
  }
  if (wake) wake_.notify_all();
  take_ranges(0);
  for (int spin = 0; busy_.load(std::memory_order_acquire) != 0; ++spin) {
    if (spin < spins_)
      pause();
    else
      std::this_thread::yield();
  }
}

void ThreadPool::work(int thread) {
  uint64_t seen = 0;
  for (;;) {
    for (int spin = 0; spin < spins_ && generation_.load(std::memory_order_acquire) == seen; ++spin) pause();
    if (generation_.load(std::memory_order_acquire) == seen) {
      std::unique_lock<std::mutex> lock(mutex_);
      ++sleepers_;
      wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
      --sleepers_;
    }
    seen = generation_.load(std::memory_order_acquire);
    if (stopping_.load()) return;
    take_ranges(thread);
    busy_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace rvllm
