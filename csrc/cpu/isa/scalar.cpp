// Plain loops: the specification of every other table.
#include "cpu/kernels.h"
#include "half.h"

namespace rvllm {
namespace {
#include "cpu/isa/vec_scalar.h"
#include "cpu/float_kernels.inl"
#include "cpu/expert_kernels.inl"
#include "cpu/attention_kernels.inl"
#include "cpu/linear_kernels.inl"
#include "cpu/kernel_table.inl"
}  // namespace

const Kernels& kernels_scalar() noexcept {
  static constexpr Kernels table = make_table("scalar");
  return table;
}

}  // namespace rvllm
