// 128-bit vectors of Arm; integer dot products by smmla where rows make pairs, else by sdot.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "cpu/kernels.h"

namespace rvllm {
namespace {
#include "cpu/isa/vec_neon.h"
#include "cpu/float_kernels.inl"
#include "cpu/expert_kernels.inl"
#include "cpu/attention_kernels.inl"
#include "cpu/linear_kernels.inl"
#include "cpu/kernel_table.inl"
}  // namespace

const Kernels& kernels_neon_i8mm() noexcept {
  static constexpr Kernels table = make_table("neon_i8mm");
  return table;
}

}  // namespace rvllm
#endif
