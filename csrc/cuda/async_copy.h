// Copies of 16 bytes from global to shared memory that go on while their thread computes (cp.async; Turing has none and
// waits). end_group() closes a group of them; after wait<n>() all groups but the last n are there for their own thread,
// and for the others after a barrier. The emulator copies as late as this allows.
#pragma once

#include "cuda/gpu.h"

#if defined(RV_EMU)
#include <vector>
#endif

namespace rvllm::cuda {

class AsyncCopies {
 public:
#if defined(RV_EMU)
  void copy(uint4* shared, const uint4* global, bool wanted) {
    if (!wanted) return;
    if (emu::is_lazy())
      groups_.back().push_back({shared, global});
    else
      *shared = *global;
  }
  void end_group() { groups_.emplace_back(); }
  template <int n>
  void wait() {
    for (; groups_.size() > n + 1; groups_.erase(groups_.begin()))
      for (const Copy& c : groups_.front()) *c.to = *c.from;
  }

 private:
  struct Copy {
    uint4* to;
    const uint4* from;
  };
  std::vector<std::vector<Copy>> groups_{1};  // the last is open
#else
  __device__ __forceinline__ void copy(uint4* shared, const uint4* global, bool wanted) {
#if __CUDA_ARCH__ >= 800
    const uint32_t to = uint32_t(__cvta_generic_to_shared(shared));
    asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}" ::"r"(to),
                 "l"(__cvta_generic_to_global(global)), "r"(int(wanted))
                 : "memory");
#else
    if (wanted) *shared = __ldg(global);
#endif
  }
  __device__ __forceinline__ void end_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
  }
  template <int n>
  __device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
#endif
  }
#endif
};

}  // namespace rvllm::cuda
