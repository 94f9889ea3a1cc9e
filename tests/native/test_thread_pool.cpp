// Runs under ThreadSanitizer: every element is visited once, with pools that come, go, sleep and wake.
#include <chrono>
#include <cstdio>
#include <vector>

#include "thread_pool.h"

namespace {

bool covers(rvllm::ThreadPool& pool, int64_t count, int64_t grain) {
  std::vector<int> visits(size_t(count), 0);  // plain ints: two threads on one element would be a reported race
  std::vector<int> sums(size_t(pool.size()), 0);
  pool.parallel_for(count, grain, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t i = begin; i < end; ++i) ++visits[size_t(i)];
    sums[size_t(thread)] += int(end - begin);
  });
  int64_t total = 0;
  for (int sum : sums) total += sum;
  for (int v : visits)
    if (v != 1) return false;
  return total == count;
}

// Every loop of two threads and more is noted once for each thread that took part, and at most.
bool notes(rvllm::ThreadPool& pool) {
  constexpr int64_t kLoops = 2000, kOperations = 3;
  rvllm::Recorder& recorder = pool.record();
  const int64_t start = rvllm::now_ns();
  for (int64_t i = 0; i < kLoops; ++i) {
    recorder.operation = i % kOperations;
    if (!covers(pool, 64, 1)) return false;
  }
  recorder.operation = 0;
  const int64_t elapsed = rvllm::now_ns() - start;
  for (const rvllm::TimeLog& thread : recorder.threads) {
    int64_t total = 0, sum = 0, last = start;
    for (const rvllm::TimeSlice& slice : thread.slices()) {
      if (slice.start < last || slice.stop < slice.start || slice.operation >= kOperations) return false;
      sum += slice.stop - slice.start;
      last = slice.stop;
    }
    for (int64_t i = 0; i < kOperations; ++i) total += thread.total(size_t(i)).ns;
    if (total != sum || total > elapsed || int64_t(thread.slices().size()) > kLoops) return false;
  }
  int64_t waited = 0;
  for (int64_t ns : recorder.waiting) waited += ns;
  return waited <= elapsed;
}

bool keeps_the_first_slices() {
  rvllm::TimeLog log;
  const int64_t count = int64_t(rvllm::TimeLog::kMaxSlices) + 5;
  for (int64_t i = 0; i < count; ++i) log.add(1, i, i + 2);
  if (log.num_lost() != 5 || log.total(1).ns != 2 * count || log.total(1).slices != count) return false;
  if (log.slices().back().start != count - 6) return false;
  log.reset_totals();
  if (log.total(1).ns != 0 || log.slices().empty()) return false;
  log.reset();
  return log.slices().empty() && log.num_lost() == 0;
}

}  // namespace

int main() {
  for (int threads : {1, 2, 3, 8}) {
    rvllm::ThreadPool pool(threads);
    for (int round = 0; round < 300; ++round) {
      for (int64_t count : {0, 1, 2, 7, 64, 1000})
        for (int64_t grain : {1, 3, 100})
          if (!covers(pool, count, grain)) {
            std::printf("threads %d, count %lld, grain %lld: not covered once\n", threads, (long long)count,
                        (long long)grain);
            return 1;
          }
      if (round % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));  // workers fall asleep
    }
  }
  for (int threads : {1, 2, 8}) {
    rvllm::ThreadPool pool(threads);
    if (!notes(pool)) {
      std::printf("threads %d: what was noted does not fit\n", threads);
      return 1;
    }
  }
  if (!keeps_the_first_slices()) {
    std::puts("time log: wrong slices");
    return 1;
  }
  for (int i = 0; i < 50; ++i) rvllm::ThreadPool pool(4);  // stopped before any work
  std::puts("thread pool: ok");
}
