#include "thread_pool.h"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace rvllm {
namespace {

// 50 to 100 us: bridges the gap between two operations of a step. A thread that spins for longer uses up its share of a
// busy processor, and is then taken off it in the middle of its work while all others wait.
constexpr int kSpins = 2000;

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
  for (int i = 1; i < num_threads; ++i) try {
      workers_.emplace_back(&ThreadPool::work, this, i);
    } catch (const std::system_error& error) {
      stop();
      throw std::runtime_error("cannot start thread " + std::to_string(i + 1) + " of " + std::to_string(num_threads) +
                               ": " + error.code().message());
    }
}

void ThreadPool::stop() {
  if (getpid() != pid_) {  // a child of fork, which has none of the threads: there is nobody to join or to wake
    new std::vector<std::thread>(std::move(workers_));
    new (&mutex_) std::mutex;
    new (&wake_) std::condition_variable;
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_.store(true);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

Recorder& ThreadPool::record() {
  if (!recorder_) recorder_ = std::make_unique<Recorder>(size());
  return *recorder_;
}

void ThreadPool::take_ranges(uint32_t generation, int thread) {
  int64_t taken = 0, operation = 0, start = 0;
  uint64_t state = state_.load(std::memory_order_acquire);
  while (state >> 32 == generation && uint32_t(state) != 0) {
    const auto* body = body_.load(std::memory_order_relaxed);
    const int64_t count = count_.load(std::memory_order_relaxed), grain = grain_.load(std::memory_order_relaxed);
    if (!state_.compare_exchange_weak(state, state - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
    if (taken == 0 && thread > 0 && recorder_) {
      operation = recorder_->operation;
      start = now_ns();
    }
    const int64_t begin = int64_t(uint32_t(state) - 1) * grain;
    (*body)(begin, std::min(begin + grain, count), thread);
    ++taken;
    state = state_.load(std::memory_order_acquire);
  }
  if (taken == 0) return;
  if (thread > 0 && recorder_) recorder_->threads[size_t(thread)].add(operation, start, now_ns());
  finished_.fetch_add(taken, std::memory_order_release);  // after this the caller may go on
}

void ThreadPool::parallel_for(int64_t count, int64_t grain,
                              const std::function<void(int64_t, int64_t, int)>& body) {
  if (!recorder_ || recorder_->operation != 0) return run(count, grain, body);
  const int64_t start = now_ns();
  run(count, grain, body);
  recorder_->threads[0].add(0, start, now_ns());
}

void ThreadPool::run(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t, int)>& body) {
  if (count <= 0) return;
  const int64_t ranges = (count + grain - 1) / grain;
  if (workers_.empty() || ranges == 1) {
    for (int64_t begin = 0; begin < count; begin += grain) body(begin, std::min(begin + grain, count), 0);
    return;
  }
  body_.store(&body, std::memory_order_relaxed);
  count_.store(count, std::memory_order_relaxed);
  grain_.store(grain, std::memory_order_relaxed);
  finished_.store(0, std::memory_order_relaxed);
  const uint32_t generation = uint32_t(state_.load(std::memory_order_relaxed) >> 32) + 1;
  bool wake;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    state_.store(uint64_t(generation) << 32 | uint64_t(ranges), std::memory_order_release);
    wake = sleepers_ > 0;
  }
  if (wake) wake_.notify_all();
  take_ranges(generation, 0);
  if (finished_.load(std::memory_order_acquire) != ranges) wait_for(ranges);
}

void ThreadPool::wait_for(int64_t ranges) {
  const int64_t start = recorder_ ? now_ns() : 0;
  for (int spin = 0; finished_.load(std::memory_order_acquire) != ranges; ++spin) {
    if (spin < spins_)
      pause();
    else
      std::this_thread::yield();
  }
  if (recorder_) recorder_->add_waiting(now_ns() - start);
}

void ThreadPool::work(int thread) {
  uint32_t seen = 0;
  const auto idle = [&] { return uint32_t(state_.load(std::memory_order_acquire) >> 32) == seen && !stopping_.load(); };
  for (;;) {
    for (int spin = 0; spin < spins_ && idle(); ++spin) pause();
    if (idle()) {
      std::unique_lock<std::mutex> lock(mutex_);
      ++sleepers_;
      wake_.wait(lock, [&] { return !idle(); });
      --sleepers_;
    }
    if (stopping_.load()) return;
    seen = uint32_t(state_.load(std::memory_order_acquire) >> 32);
    take_ranges(seen, thread);
  }
}

}  // namespace rvllm
