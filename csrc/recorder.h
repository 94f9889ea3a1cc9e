// What each thread of a pool worked on, and when. There is one only while profiling.
#pragma once

#include <cstdint>
#include <vector>

#include "clock.h"

namespace rvllm {

struct TimeSlice {
  int64_t operation, start, stop;  // ns
};

class alignas(64) TimeLog {  // a cache line that no other thread writes to
 public:
  struct Total {
    int64_t slices = 0, ns = 0;
  };
  static constexpr size_t kMaxSlices = size_t(1) << 18;  // what comes later counts, but is not kept

  TimeLog() { slices_.reserve(kMaxSlices); }  // pages come to life as they are written

  void add(int64_t operation, int64_t start, int64_t stop) {
    if (size_t(operation) >= totals_.size()) totals_.resize(size_t(operation) + 1);
    Total& total = totals_[size_t(operation)];
    ++total.slices;
    total.ns += stop - start;
    if (slices_.size() < kMaxSlices)
      slices_.push_back({operation, start, stop});
    else
      ++num_lost_;
  }

  void reset() {
    reset_totals();
    slices_.clear();
    num_lost_ = 0;
  }
  void reset_totals() { totals_.clear(); }  // keeps the slices

  Total total(size_t operation) const { return operation < totals_.size() ? totals_[operation] : Total(); }
  const std::vector<TimeSlice>& slices() const { return slices_; }
  int64_t num_lost() const { return num_lost_; }

 private:
  std::vector<Total> totals_;  // of each operation
  std::vector<TimeSlice> slices_;
  int64_t num_lost_ = 0;
};

// Read and set by the caller between loops; during one, each thread writes its own log before it reports its work as
// done. The caller's loops are many and it pays for each look at the clock, so of them only the waiting is noted.
struct Recorder {
  explicit Recorder(int num_threads) : threads(size_t(num_threads)) {}

  int64_t operation = 0;         // what loops belong to; 0: to none
  std::vector<TimeLog> threads;  // work; the caller's own, the first, by operations, and by loops that belong to none
  std::vector<int64_t> waiting;  // ns of the caller, for the others to finish, of each operation

  void add_waiting(int64_t ns) {
    if (size_t(operation) >= waiting.size()) waiting.resize(size_t(operation) + 1);
    waiting[size_t(operation)] += ns;
  }
};

}  // namespace rvllm
