// 256-bit vectors; integer dot products by vpdpbusd.
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

const Kernels& kernels_avx_vnni() noexcept {
  static constexpr Kernels table = make_table("avx_vnni");
  return table;
}

}  // namespace rvllm
#endif
