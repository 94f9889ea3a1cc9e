// Products by few tokens, or by few rows: several warps share the outputs of one, to keep memory busy.
#pragma once

#include "cuda/block_products.h"

namespace rvllm::cuda {

// What mma_k32 takes of kTiles tiles of activations in one block. x: the place in QuantizedRows::q of the first.
template <int kTiles>
__device__ __forceinline__ void load_tiles(const uint4* x, bool is_odd, uint2 (&b)[kTiles]) {
  if constexpr (kTiles == 1) {
    b[0] = __ldg(reinterpret_cast<const uint2*>(x) + is_odd);
  } else {
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      const uint4 both = __ldg(x + n / 2 * 32);
      b[n] = {both.x, both.y};
      b[n + 1] = {both.z, both.w};
    }
  }
}

// blockDim.y warps share K: each reads every blockDim.y-th unit of it and makes its integer sums at once, then they add
// their units to the float sums in turn, handing these on through shared memory. kUnit: blocks of 32 k that a warp adds
// in one turn; it divides kChunkBlocks. Bound by memory up to some 16 tokens. grid: [tiles of rows / tiles a block,
// groups of kTiles tiles of tokens / groups a block]; block: [32, warps that share K, tiles of rows x groups].
template <class F, int kTiles, int kUnit>
__global__ void __launch_bounds__(256, 1) few_tokens_kernel(QuantizedLinearArgs args) {
  RV_DYN_SHARED(float4, handed_on);  // [blockDim.z, kTiles, 32]
  const int tile = int(blockIdx.x) * args.tiles_a_block + int(threadIdx.z) % args.tiles_a_block;
  const int group = int(blockIdx.y) * args.groups_a_block + int(threadIdx.z) / args.tiles_a_block;
  const Outputs<kTiles> outputs(args, tile, group * kTiles);
  const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y, together = args.x.together;
  const int units = (args.blocks + kUnit - 1) / kUnit, pairs = (args.blocks + 1) / 2;
  float4* const mine = handed_on + (threadIdx.z * kTiles) * 32 + lane;
  const int64_t first_place = args.x.place(outputs.first_tile, 0);

  float total[kTiles][4] = {};
  CodePair<F> codes[kUnit / 2];
  const auto load_codes = [&](int unit) {
#pragma unroll
    for (int p = 0; p < kUnit / 2; ++p)
      if (unit * (kUnit / 2) + p < pairs) codes[p].load(outputs.weight, args.layout, unit * (kUnit / 2) + p, lane);
  };
  if (warp < units) load_codes(warp);
  for (int first = 0; first < units; first += warps) {
    const int unit = first + warp;
    const bool has_unit = outputs.is_active && unit < units;
    const int count = has_unit ? min(kUnit, args.blocks - unit * kUnit) : 0;
    const int64_t place = first_place + int64_t(unit) * kUnit * together;
    const auto has_block = [&](int i) { return F::kSuper || i < count; };  // super-blocks are whole units
    RowScales<F, kUnit> scales[2];
    float4 x_scales[kUnit][kTiles];
    int sums[kUnit][kTiles][kHalves<F>][4];
    if (has_unit) {
      const uint8_t* const chunk =
          outputs.weight + args.layout.scales + int64_t(unit * kUnit / kChunkBlocks) * F::kChunkBytes;
      scales[0].load(chunk, lane / 4, unit * kUnit % kChunkBlocks);
      scales[1].load(chunk, lane / 4 + 8, unit * kUnit % kChunkBlocks);
      // All reads before the first product, and no branch around products: of blocks that are not there, none counts.
      uint2 b[kUnit][kTiles] = {};
#pragma unroll
      for (int i = 0; i < kUnit; ++i)
        if (has_block(i)) {
          load_tiles<kTiles>(args.x.q + place / 2 * 32 + lane + i * (together / 2 * 32), outputs.first_tile % 2, b[i]);
#pragma unroll
          for (int n = 0; n < kTiles; ++n)
            x_scales[i][n] = __ldg(args.x.scale + place * 4 + lane % 4 + (i * together + n) * 4);
        }
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        uint32_t a[4];
        if (i % 2 == 0)
          codes[i / 2].template unpack<0>(args.codebook, a);
        else
          codes[i / 2].template unpack<1>(args.codebook, a);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) dot<F>(a, b[i][n], sums[i][n]);
      }
    }
    if (unit + warps < units) load_codes(unit + warps);  // on their way while sums are added
    BlockScales<F> w[kUnit];
    if (has_unit)
#pragma unroll
      for (int i = 0; i < kUnit; ++i) w[i] = {scales[0].at(i), scales[1].at(i), args.unit};
    for (int turn = 0; turn < warps; ++turn) {
      if (turn == warp && has_unit) {
        if (warps > 1 && unit > 0)
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            const float4 before = mine[n * 32];
            total[n][0] = before.x, total[n][1] = before.y, total[n][2] = before.z, total[n][3] = before.w;
          }
#pragma unroll
        for (int i = 0; i < kUnit; ++i)
          if (has_block(i))
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
              int4 half_sum = {0, 0, 0, 0};
              if constexpr (F::kHalved && F::kHasMin)
                half_sum = __ldg(args.x.half_sum + place * 4 + lane % 4 + (i * together + n) * 4);
              add_block<F>(w[i], x_scales[i][n], half_sum, sums[i][n], total[n]);
            }
        if (warps > 1)
#pragma unroll
          for (int n = 0; n < kTiles; ++n)
            mine[n * 32] = make_float4(total[n][0], total[n][1], total[n][2], total[n][3]);
      }
      if (warps > 1) __syncthreads();
    }
  }
  if (outputs.is_active && warp == (units - 1) % warps) outputs.write(args, total);
}

}  // namespace rvllm::cuda
