// 256-bit vectors; integer dot products by maddubs.
#if defined(__x86_64__)
#include <immintrin.h>

#include "cpu/kernels.h"

namespace rvllm {
namespace {
#include "cpu/isa/vec_avx2.h"
#include "cpu/float_kernels.inl"
#include "cpu/expert_kernels.inl"
#include "cpu/attention_kernels.inl"
#include "cpu/linear_kernels.inl"
#include "cpu/kernel_table.inl"
}  // namespace

const Kernels& kernels_avx2() noexcept {
  static constexpr Kernels table = make_table("avx2");
  return table;
}

}  // namespace rvllm
#endif
