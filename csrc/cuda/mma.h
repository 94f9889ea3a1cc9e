// The integer tensor-core product, and what it is made of where that is missing.
//
// A warp multiplies a [16 x 16] tile of int8 by a [16 x 8] one and adds to [16 x 8] int32. Lane 4 g + t holds, of the
// first, k 4t..4t+3 of row g (a0) and of row g + 8 (a1); of the second, k 4t..4t+3 of column g (b); of the sums,
// columns 2t and 2t + 1 of row g (c0, c1) and of row g + 8 (c2, c3): PTX ISA, "Matrix Fragments for mma.m16n8k16".
#pragma once

#include "cuda/gpu.h"

namespace rvllm::cuda {

#if defined(RV_EMU)
__device__ RV_EMU_NO_TSAN inline void mma_k16(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  const unsigned lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
  uint32_t rows[2][4];
  const uint64_t* lanes = emu::warp_exchange(kFullWarp, uint64_t(a0) | uint64_t(a1) << 32, __builtin_LINE());
  for (unsigned i = 0; i < 4; ++i) {
    rows[0][i] = uint32_t(lanes[4 * g + i]);
    rows[1][i] = uint32_t(lanes[4 * g + i] >> 32);
  }
  lanes = emu::warp_exchange(kFullWarp, b, __builtin_LINE());
  for (unsigned column = 0; column < 2; ++column)
    for (unsigned i = 0; i < 4; ++i)
      for (unsigned row = 0; row < 2; ++row)
        c[2 * row + column] = __dp4a(int(rows[row][i]), int(lanes[4 * (2 * t + column) + i]), c[2 * row + column]);
}
#else
__device__ __forceinline__ void mma_k16(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a0), "r"(a1), "r"(b));
#else
  asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
               : "+r"(c[0]), "+r"(c[1]) : "r"(a0), "r"(b));
  asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
               : "+r"(c[2]), "+r"(c[3]) : "r"(a1), "r"(b));
#endif
}
#endif

// The same over k 0..31: a0, a1 and b0 hold k 0..15, a2, a3 and b1 k 16..31.
__device__ __forceinline__ void mma_k32(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if !defined(RV_EMU) && __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  mma_k16(c, a[0], a[1], b0);
  mma_k16(c, a[2], a[3], b1);
#endif
}

}  // namespace rvllm::cuda
