// One block of 32 k of a quantized product: its integer sums, their scaling, and where the outputs go. Exact: every
// float operation is one of csrc/cpu/linear_kernels.inl in the same order, whatever the number of tokens and however
// the work is cut.
#pragma once

#include "cuda/mma.h"
#include "cuda/quantized_linear.h"
#include "cuda/unpack.h"

namespace rvllm::cuda {

// Integers below 2^22 added to the bits of this float change its value by as much: no conversion is needed.
constexpr int kMagicBits = 0x4b400000;
constexpr float kMagic = 12582912.0f;

__device__ __forceinline__ float exact_float(int sum) { return __int_as_float(sum) - kMagic; }

template <class F>
constexpr int kHalves = F::kHalved ? 2 : 1;

// Integer sums over one block of 32 k: over all of it, with kMagicBits added, or over each half.
template <class F>
__device__ __forceinline__ void dot(const uint32_t (&a)[4], const uint2& b, int (&sums)[kHalves<F>][4]) {
  if constexpr (F::kHalved) {
    const int zeros[4] = {0, 0, 0, 0};
    mma_k16(sums[0], a[0], a[1], b.x, zeros);
    mma_k16(sums[kHalves<F> - 1], a[2], a[3], b.y, zeros);
  } else {
    const int magic[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits};
    mma_k32(sums[0], a, b.x, b.y, magic);
  }
}

// Of rows g and g + 8 in one block.
template <class F>
struct BlockScales {
  float d[2], m[2];
  int scale[2][2], min[2][2];  // of the halves, where F::kHalved

  __device__ __forceinline__ BlockScales(const Scale<F>& low, const Scale<F>& high, float unit) {
    const Scale<F> rows[2] = {low, high};
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      d[row] = rows[row].d(unit);
      m[row] = rows[row].m();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scale[row][half] = F::kHalved ? rows[row].scale_of(half) : 0;
        min[row][half] = F::kHalved && F::kHasMin ? rows[row].min_of(half) : 0;
      }
    }
  }
  // The same in 16 bytes: what is the same for all tokens is computed, but not taken apart.
  static __device__ __forceinline__ uint4 packed(const Scale<F>& low, const Scale<F>& high, float unit) {
    if constexpr (F::kHalved) return {low.header, high.header, low.scale, high.scale};
    const BlockScales s(low, high, unit);
    return {__float_as_uint(s.d[0]), __float_as_uint(s.d[1]), __float_as_uint(s.m[0]), __float_as_uint(s.m[1])};
  }
  static __device__ __forceinline__ BlockScales unpacked(const uint4& p, float unit) {
    if constexpr (F::kHalved) {
      Scale<F> low, high;
      low.header = p.x, high.header = p.y, low.scale = p.z, high.scale = p.w;
      return BlockScales(low, high, unit);
    }
    return BlockScales(__uint_as_float(p.x), __uint_as_float(p.y), __uint_as_float(p.z), __uint_as_float(p.w));
  }

 private:
  __device__ __forceinline__ BlockScales(float d0, float d1, float m0, float m1)
      : d{d0, d1}, m{m0, m1}, scale{}, min{} {}
};

// Below 2^24; unsigned, since those of places without a token may be anything.
__device__ __forceinline__ float weighted(const int (&factors)[2], int low, int high) {
  return float(int(uint32_t(factors[0]) * uint32_t(low) + uint32_t(factors[1]) * uint32_t(high)));
}

// Adds the scaled sums of one block to the float sums of rows g and g + 8, tokens 2 t and 2 t + 1. x: of QuantizedRows.
template <class F>
__device__ __forceinline__ void add_block(const BlockScales<F>& w, const float4& x, const int4& half_sum,
                                          const int (&sums)[kHalves<F>][4], float (&total)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i / 2;
    const float s = i % 2 ? x.y : x.x;
    if constexpr (F::kHalved) {
      total[i] = fmaf(weighted(w.scale[row], sums[0][i], sums[kHalves<F> - 1][i]), w.d[row] * s, total[i]);
      if constexpr (F::kHasMin) {
        const float j = i % 2 ? weighted(w.min[row], half_sum.z, half_sum.w)
                              : weighted(w.min[row], half_sum.x, half_sum.y);
        total[i] = fmaf(w.m[row], j * s, total[i]);
      }
    } else {
      total[i] = fmaf(exact_float(sums[0][i]), w.d[row] * s, total[i]);
      if constexpr (F::kHasMin) total[i] = fmaf(w.m[row], i % 2 ? x.w : x.z, total[i]);
    }
  }
}

// Which outputs a warp makes: those of a tile of rows and of kTiles tiles of tokens.
template <int kTiles>
struct Outputs {
  int tile, first_tile, expert;
  bool is_active;
  const uint8_t* weight;  // of the tile

  __device__ __forceinline__ Outputs(const QuantizedLinearArgs& args, int row_tile, int first_token_tile)
      : tile(row_tile), first_tile(first_token_tile) {
    const bool has_tokens = first_tile < args.token_tiles;
    expert = args.experts.tile_expert && has_tokens ? args.experts.tile_expert[first_tile] : 0;
    is_active = tile < args.row_tiles && has_tokens && expert >= 0;
    weight = args.weight + (is_active ? expert * args.expert_bytes + tile * args.layout.bytes : 0);
  }
  __device__ __forceinline__ void write(const QuantizedLinearArgs& args, const float (&total)[kTiles][4]) const {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = tile * kTileRows + g + 8 * (i / 2), place = (first_tile + n) * 8 + 2 * t + i % 2;
        const int token = args.experts.tile_expert ? args.experts.choices[place] : place;
        if (row >= args.rows || token < 0 || token >= args.tokens) continue;
        float y = total[n][i];
        if (args.bias) y += args.bias[int64_t(expert) * args.rows + row];
        args.out[token * args.out_stride + row] = y;
        if (args.residual.rows) args.residual.rows[token * args.residual.stride + row] += args.residual.scale * y;
      }
  }
};

}  // namespace rvllm::cuda
