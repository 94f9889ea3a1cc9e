// The profiler's clock: the processor's own counter where it ticks evenly, since asking the system takes longer and
// makes the processor finish what it has begun.
#pragma once

#include <chrono>
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#include <x86intrin.h>
#endif

namespace rvllm {

inline int64_t system_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

#if defined(__x86_64__)
// Nanoseconds of a tick, compared with the system's clock for 10 ms; 0 if ticks are not even.
inline double measure_tick_ns() {
  unsigned a, b, c, d;
  constexpr unsigned kPowerManagement = 0x80000007, kInvariant = 1u << 8;
  if (!__get_cpuid(kPowerManagement, &a, &b, &c, &d) || !(d & kInvariant)) return 0;
  const int64_t start = system_ns();
  const uint64_t first = __rdtsc();
  int64_t now = start;
  while (now - start < 10'000'000) now = system_ns();
  return double(now - start) / double(__rdtsc() - first);
}

// Nanoseconds of a clock that never goes back.
inline int64_t now_ns() {
  static const double tick_ns = measure_tick_ns();
  static const uint64_t first = __rdtsc();
  return tick_ns > 0 ? int64_t(double(__rdtsc() - first) * tick_ns) : system_ns();
}
#else
inline int64_t now_ns() { return system_ns(); }
#endif

}  // namespace rvllm
