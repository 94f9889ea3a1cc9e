// The integer tensor-core product, and what it is made of where that is missing.
//
// A warp multiplies a [16 x 16] tile of int8, or of uint8 unless kSigned, by a [16 x 8] one of int8 and adds [16 x 8]
// int32. Lane 4 g + t holds, of the first, k 4t..4t+3 of row g (a0) and of row g + 8 (a1); of the second, k 4t..4t+3
// of column g (b); of the sums (d) and of what is added (c), columns 2t and 2t + 1 of row g (0, 1) and of row g + 8
// (2, 3): PTX ISA, "Matrix Fragments for mma.m16n8k16". c has registers of its own: where it is the same each time,
// nothing is copied.
#pragma once

#include "cuda/gpu.h"

namespace rvllm::cuda {

#if defined(RV_EMU)
template <bool kSigned>
__device__ RV_EMU_NO_TSAN inline void mma_k16(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b, const int (&c)[4]) {
  const unsigned lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
  uint32_t rows[2][4];
  const uint64_t* lanes = emu::warp_exchange(kFullWarp, uint64_t(a0) | uint64_t(a1) << 32, __builtin_LINE());
  for (unsigned i = 0; i < 4; ++i) {
    rows[0][i] = uint32_t(lanes[4 * g + i]);
    rows[1][i] = uint32_t(lanes[4 * g + i] >> 32);
  }
  lanes = emu::warp_exchange(kFullWarp, b, __builtin_LINE());
  for (unsigned column = 0; column < 2; ++column)
    for (unsigned row = 0; row < 2; ++row) {
      int sum = c[2 * row + column];
      for (unsigned i = 0; i < 4; ++i)
        for (unsigned bit = 0; bit < 32; bit += 8) {
          const uint8_t code = uint8_t(rows[row][i] >> bit);
          sum += (kSigned ? int(int8_t(code)) : int(code)) * int(int8_t(lanes[4 * (2 * t + column) + i] >> bit));
        }
      d[2 * row + column] = sum;
    }
}
#else
// As asm takes the type of the first tile.
template <bool kSigned>
struct CodeType {
  static constexpr char value[] = "s8";
};
template <>
struct CodeType<false> {
  static constexpr char value[] = "u8";
};

template <bool kSigned>
__device__ __forceinline__ void mma_k16(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b, const int (&c)[4]) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.s32.%11.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(b), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "C"(CodeType<kSigned>::value));
#else
  asm("mma.sync.aligned.m8n8k16.row.col.s32.%6.s8.s32 {%0,%1}, {%2}, {%3}, {%4,%5};"
      : "=r"(d[0]), "=r"(d[1]) : "r"(a0), "r"(b), "r"(c[0]), "r"(c[1]), "C"(CodeType<kSigned>::value));
  asm("mma.sync.aligned.m8n8k16.row.col.s32.%6.s8.s32 {%0,%1}, {%2}, {%3}, {%4,%5};"
      : "=r"(d[2]), "=r"(d[3]) : "r"(a1), "r"(b), "r"(c[2]), "r"(c[3]), "C"(CodeType<kSigned>::value));
#endif
}
#endif

// The same over k 0..31: a0, a1 and b0 hold k 0..15, a2, a3 and b1 k 16..31.
template <bool kSigned>
__device__ __forceinline__ void mma_k32(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                        const int (&c)[4]) {
#if !defined(RV_EMU) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.%14.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]),
        "C"(CodeType<kSigned>::value));
#else
  int low[4];
  mma_k16<kSigned>(low, a[0], a[1], b0, c);
  mma_k16<kSigned>(d, a[2], a[3], b1, low);
#endif
}

}  // namespace rvllm::cuda
