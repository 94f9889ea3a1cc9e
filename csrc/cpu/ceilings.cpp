#include "cpu/ceilings.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

namespace rvllm {
namespace {

constexpr int64_t kTryingNs = 80'000'000;
constexpr int64_t kPieceBytes = int64_t(1) << 20, kPieces = 128;  // more than most caches hold
constexpr int64_t kRepeats = 64;  // of the dot products in one range: long beside the cost of a loop

// Nanoseconds of the fastest of several calls.
template <class Call>
double fastest_ns(const Call& call) {
  const int64_t begin = now_ns();
  int64_t best = INT64_MAX, last = begin;
  while (last - begin < kTryingNs) {
    call();
    const int64_t now = now_ns();
    best = std::min(best, now - last);
    last = now;
  }
  return double(best);
}

double read_bytes_per_second(ThreadPool& pool) {
  std::vector<uint64_t> memory(size_t(kPieces * kPieceBytes / 8));  // zeroed, so its pages are its own
  std::atomic<uint64_t> total{0};                                   // so that the compiler keeps the loop
  const double ns = fastest_ns([&] {
    pool.parallel_for(kPieces, 1, [&](int64_t piece, int64_t, int) {
      const uint64_t* p = memory.data() + piece * (kPieceBytes / 8);
      uint64_t sum = 0;
      for (int64_t i = 0; i < kPieceBytes / 8; ++i) sum += p[i];
      total.fetch_add(sum, std::memory_order_relaxed);
    });
  });
  return double(kPieces * kPieceBytes) / ns * 1e9;
}

double macs_per_second(ThreadPool& pool, const Kernels& kernels) {
  struct alignas(64) Data {
    uint8_t codes[kMaxChunk * kTileCodes];
    int8_t x[kRowBlock * 32 * kMaxChunk];
    float out[kRowBlock * kTileCols];
  };
  std::vector<Data> data(size_t(pool.size()));
  for (Data& d : data) {
    std::memset(d.codes, 7, sizeof(d.codes));
    std::memset(d.x, 1, sizeof(d.x));
  }
  const int64_t ranges = 8 * pool.size();
  const double ns = fastest_ns([&] {
    pool.parallel_for(ranges, 1, [&](int64_t, int64_t, int thread) {
      Data& d = data[size_t(thread)];
      for (int64_t i = 0; i < kRepeats; ++i) kernels.dot_products(d.codes, d.x, d.out);
    });
  });
  return double(ranges * kRepeats * kRowBlock * kTileCols * 32 * kMaxChunk) / ns * 1e9;
}

}  // namespace

Ceilings measure_ceilings(ThreadPool& pool, const Kernels& kernels) {
  return {read_bytes_per_second(pool), macs_per_second(pool, kernels)};
}

}  // namespace rvllm
