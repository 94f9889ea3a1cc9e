// A fixed set of threads that run one parallel loop at a time. The caller's thread works too.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace rvllm {

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;

  int size() const { return int(workers_.size()) + 1; }

  // Calls body(begin, end, thread) over disjoint ranges that cover [0, count), each at most `grain` long, and returns
  // when all are done. Which thread gets which range is not fixed, so results must not depend on it.
  // One call at a time; body must not throw.
  void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t, int)>& body);

 private:
  void work(int thread);
  void take_ranges(int thread);

  std::vector<std::thread> workers_;
  const std::function<void(int64_t, int64_t, int)>* body_ = nullptr;
  int64_t count_ = 0, grain_ = 1;
  std::atomic<int64_t> next_{0};
  std::atomic<int> busy_{0};
  std::atomic<uint64_t> generation_{0};
  std::atomic<bool> stopping_{false};
  int spins_;
  int sleepers_ = 0;  // guarded by mutex_
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace rvllm
