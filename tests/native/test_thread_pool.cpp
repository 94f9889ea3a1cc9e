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
  for (int i = 0; i < 50; ++i) rvllm::ThreadPool pool(4);  // stopped before any work
  std::puts("thread pool: ok");
}
