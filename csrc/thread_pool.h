// A fixed set of threads that run one parallel loop at a time. The caller's thread works too.
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "recorder.h"

namespace rvllm {

class ThreadPool {
 public:
  // Throws runtime_error if the system refuses a thread.
  explicit ThreadPool(int num_threads);
  ~ThreadPool() { stop(); }
  ThreadPool(const ThreadPool&) = delete;

  int size() const { return int(workers_.size()) + 1; }

  // Calls body(begin, end, thread) over disjoint ranges that cover [0, count), each at most `grain` long, and returns
  // when all are done. Which thread gets which range is not fixed, so results must not depend on it.
  // One call at a time; body must not throw.
  void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t, int)>& body);

  // From now on, notes who works when; not to be called during a loop. The recorder lives as long as the pool.
  Recorder& record();

 private:
  void run(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t, int)>& body);
  void wait_for(int64_t ranges);  // until so many are finished
  void work(int thread);
  void take_ranges(uint32_t generation, int thread);
  void stop();

  std::vector<std::thread> workers_;
  std::unique_ptr<Recorder> recorder_;
  // The loop under way. Written while no range is left to take, so only who takes one may trust what it read.
  std::atomic<const std::function<void(int64_t, int64_t, int)>*> body_{nullptr};
  std::atomic<int64_t> count_{0}, grain_{1};
  // Generation of the loop in the high half, ranges not yet taken in the low half: one compare-and-swap takes a range
  // of the right loop or none. So the caller never waits for a thread that has not started, which on a busy machine may
  // take milliseconds to be scheduled; it does the work itself.
  std::atomic<uint64_t> state_{0};
  std::atomic<int64_t> finished_{0};  // ranges of the loop under way
  std::atomic<bool> stopping_{false};
  const int pid_ = getpid();
  int spins_;
  int sleepers_ = 0;  // guarded by mutex_
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace rvllm
