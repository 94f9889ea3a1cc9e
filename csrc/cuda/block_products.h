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

// A sum with kMagicBits added, without them, times factor: exact where kMagic * factor and the product are.
__device__ __forceinline__ float exact_product(int sum, float factor) {
  return fmaf(__int_as_float(sum), factor, -kMagic * factor);
}

template <class F>
constexpr int kHalves = F::kHalved ? 2 : 1;

// Integer sums over one block of 32 k, all of it or each half, with kMagicBits added.
template <class F>
__device__ __forceinline__ void dot(const uint32_t (&a)[4], const uint2& b, int (&sums)[kHalves<F>][4]) {
  const int magic[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits};
  if constexpr (F::kHalved) {
    mma_k16<F::kSigned>(sums[0], a[0], a[1], b.x, magic);
    mma_k16<F::kSigned>(sums[kHalves<F> - 1], a[2], a[3], b.y, magic);
  } else {
    mma_k32<F::kSigned>(sums[0], a, b.x, b.y, magic);
  }
}

// Of rows g and g + 8 in one block.
template <class F>
struct BlockScales {
  // How those of a chunk of blocks lie in shared memory, 16 bytes for each place and g: d and m of each block, or where
  // F::kHalved its scales, then d and m of the super-block, then minima.
  static constexpr int kPlaces = F::kHalved ? kChunkBlocks + 1 + F::kHasMin * kChunkBlocks : kChunkBlocks;
  using Chunk = uint4[kPlaces][8];
  float d[2], m[2];
  float scale[2][2];  // of the halves, where F::kHalved, by code_unit
  int min[2][2];

  BlockScales() = default;
  __device__ __forceinline__ BlockScales(const Scale<F>& low, const Scale<F>& high, float unit) {
    const Scale<F> rows[2] = {low, high};
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      d[row] = rows[row].d(unit);
      m[row] = rows[row].m();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scale[row][half] = F::kHalved ? float(rows[row].scale_of(half)) * code_unit<F>(row) : 0.0f;
        min[row][half] = F::kHalved && F::kHasMin ? rows[row].min_of(half) : 0;
      }
    }
  }
  __device__ __forceinline__ void put(Chunk& chunk, int block, int g) const {
    if (!F::kHalved || block == 0) chunk[F::kHalved ? kChunkBlocks : block][g] = words(d[0], d[1], m[0], m[1]);
    if constexpr (F::kHalved) chunk[block][g] = words(scale[0][0], scale[0][1], scale[1][0], scale[1][1]);
    if constexpr (F::kHalved && F::kHasMin)
      chunk[kChunkBlocks + 1 + block][g] = {uint32_t(min[0][0]), uint32_t(min[0][1]), uint32_t(min[1][0]),
                                            uint32_t(min[1][1])};
  }
  __device__ __forceinline__ BlockScales(const Chunk& chunk, int block, int g) : scale{}, min{} {
    take(chunk[F::kHalved ? kChunkBlocks : block][g], d, m);
    if constexpr (F::kHalved) take(chunk[block][g], scale[0], scale[1]);
    if constexpr (F::kHalved && F::kHasMin) {
      const uint4 p = chunk[kChunkBlocks + 1 + block][g];
      min[0][0] = int(p.x), min[0][1] = int(p.y), min[1][0] = int(p.z), min[1][1] = int(p.w);
    }
  }

 private:
  static __device__ __forceinline__ uint4 words(float x, float y, float z, float w) {
    return {__float_as_uint(x), __float_as_uint(y), __float_as_uint(z), __float_as_uint(w)};
  }
  static __device__ __forceinline__ void take(const uint4& p, float (&first)[2], float (&second)[2]) {
    first[0] = __uint_as_float(p.x), first[1] = __uint_as_float(p.y);
    second[0] = __uint_as_float(p.z), second[1] = __uint_as_float(p.w);
  }
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
      const float low = exact_product(sums[0][i], w.scale[row][0]);
      const float sum = fmaf(__int_as_float(sums[kHalves<F> - 1][i]) - kMagic, w.scale[row][1], low);  // below 2^24
      total[i] = fmaf(sum, w.d[row] * s, total[i]);
      if constexpr (F::kHasMin) {
        const float j = i % 2 ? weighted(w.min[row], half_sum.z, half_sum.w)
                              : weighted(w.min[row], half_sum.x, half_sum.y);
        total[i] = fmaf(w.m[row], j * s, total[i]);
      }
    } else {
      const float sum = exact_product(sums[0][i], code_unit<F>(row));
      total[i] = fmaf(sum, w.d[row] * s, total[i]);
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
