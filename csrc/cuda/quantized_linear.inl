// out = x W^T + bias for quantized weights, on the integer units of the tensor cores. Exact: every float operation is
// one of csrc/cpu/linear_kernels.inl in the same order, whatever the number of tokens and however the work is cut.
//
// A warp owns 16 rows of W times 8 kTiles tokens; blocks of 32 k follow in ascending order. Where there are too few
// such warps to keep memory busy, blockDim.y of them share the outputs: each reads every blockDim.y-th unit of K and
// makes its integer sums at once, then they add their units to the float sums in turn, handing these on through
// shared memory. Reads of W are 16 bytes a lane and coalesced; bound by memory up to some 32 tokens, by the float
// scaling after that. Included by the files that make the kernels of some formats each.
#include "cuda/mma.h"
#include "cuda/quantized_linear.h"
#include "cuda/unpack.h"

namespace rvllm::cuda {
namespace {

// Integers below 2^22 added to the bits of this float change its value by as much: no conversion is needed.
constexpr int kMagicBits = 0x4b400000;
constexpr float kMagic = 12582912.0f;

__device__ __forceinline__ float exact_float(int sum) { return __int_as_float(sum) - kMagic; }

// What an integer sum begins with, less zero times sums of activations; unsigned, since those of places without a token
// may be anything.
template <class F>
__device__ __forceinline__ int start(int first, int second = 0) {
  return int(uint32_t(kMagicBits) - uint32_t(F::kZero) * (uint32_t(first) + uint32_t(second)));
}

template <class F, int kTiles, int kUnit>
struct UnitSums {
  static constexpr int kHalves = F::kHalved ? 2 : 1;
  int sums[kUnit][kHalves][kTiles][4];
};

// Integer sums of one block of 32 k, less zero times the sum of the activations, with kMagicBits added.
template <class F, int kTiles>
__device__ __forceinline__ void dot_block(const QuantizedLinearArgs& args, const uint32_t (&a)[4], int block,
                                          int first_tile, int lane, int (&sums)[F::kHalved ? 2 : 1][kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int64_t at = int64_t(min(first_tile + n, args.token_tiles - 1)) * args.blocks + block;
    const uint2 b = __ldg(args.x.q + at * 32 + lane);
    int2 even = {0, 0}, odd = {0, 0};  // of tokens 2 t and 2 t + 1
    if constexpr (F::kZero != 0) {
      const int4 both = __ldg(reinterpret_cast<const int4*>(args.x.half_sum + at * 8) + lane % 4);
      even = {both.x, both.y};
      odd = {both.z, both.w};
    }
    if constexpr (F::kHalved) {
      int(&low)[4] = sums[0][n];
      int(&high)[4] = sums[F::kHalved ? 1 : 0][n];
      low[0] = low[2] = start<F>(even.x);
      low[1] = low[3] = start<F>(odd.x);
      high[0] = high[2] = start<F>(even.y);
      high[1] = high[3] = start<F>(odd.y);
      mma_k16(low, a[0], a[1], b.x);
      mma_k16(high, a[2], a[3], b.y);
    } else {
      int(&all)[4] = sums[0][n];
      all[0] = all[2] = start<F>(even.x, even.y);
      all[1] = all[3] = start<F>(odd.x, odd.y);
      mma_k32(all, a, b.x, b.y);
    }
  }
}

// Adds the scaled sums of one block to the float sums of rows g and g + 8.
template <class F, int kTiles>
__device__ __forceinline__ void add_block(const QuantizedLinearArgs& args, const RowScales<F> (&scales)[2], int block,
                                          int in_chunk, int first_tile, int lane,
                                          const int (&sums)[F::kHalved ? 2 : 1][kTiles][4],
                                          float (&total)[kTiles][4]) {
  float d[2], m[2], scale[2][2], minimum[2][2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    d[row] = scales[row].d(in_chunk);
    m[row] = scales[row].m(in_chunk);
    for (int half = 0; half < 2; ++half) {
      scale[row][half] = F::kHalved ? float(scales[row].scale(in_chunk, half)) : 0.0f;
      minimum[row][half] = F::kHalved && F::kHasMin ? float(scales[row].min(in_chunk, half)) : 0.0f;
    }
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int64_t at = int64_t(min(first_tile + n, args.token_tiles - 1)) * args.blocks + block;
    const float2 x_scale = __ldg(reinterpret_cast<const float2*>(args.x.scale + at * 8) + lane % 4);
    float2 x_sum = {0.0f, 0.0f};
    int4 half_sums = {0, 0, 0, 0};
    if constexpr (F::kHasMin && !F::kHalved)
      x_sum = __ldg(reinterpret_cast<const float2*>(args.x.scaled_sum + at * 8) + lane % 4);
    if constexpr (F::kHasMin && F::kHalved)
      half_sums = __ldg(reinterpret_cast<const int4*>(args.x.half_sum + at * 8) + lane % 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i / 2;
      const float s = i % 2 ? x_scale.y : x_scale.x;
      float& sum = total[n][i];
      if constexpr (F::kHalved) {
        // Whole numbers below 2^24, exact in any order.
        const float low = exact_float(sums[0][n][i]), high = exact_float(sums[F::kHalved ? 1 : 0][n][i]);
        sum = fmaf(fmaf(scale[row][0], low, scale[row][1] * high), d[row] * s, sum);
        if constexpr (F::kHasMin) {
          const float x0 = float(i % 2 ? half_sums.z : half_sums.x), x1 = float(i % 2 ? half_sums.w : half_sums.y);
          sum = fmaf(m[row], fmaf(minimum[row][0], x0, minimum[row][1] * x1) * s, sum);
        }
      } else {
        sum = fmaf(exact_float(sums[0][n][i]), d[row] * s, sum);
        if constexpr (F::kHasMin) sum = fmaf(m[row], i % 2 ? x_sum.y : x_sum.x, sum);
      }
    }
  }
}

// grid: [tiles of rows / tiles a block, tokens / tokens a block]; block: [32, warps that share K, tiles of rows x
// groups of tokens]. kUnit: blocks of 32 k that a warp adds in one turn; it divides kChunkBlocks.
template <class F, int kTiles, int kUnit>
__global__ void __launch_bounds__(256, 1) quantized_linear_kernel(QuantizedLinearArgs args) {
  RV_DYN_SHARED(float4, handed_on);  // [blockDim.z, kTiles, 32]
  const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y, g = lane / 4, t = lane % 4;
  const int tile = blockIdx.x * args.tiles_a_block + threadIdx.z % args.tiles_a_block;
  const int group = blockIdx.y * args.groups_a_block + threadIdx.z / args.tiles_a_block;
  const int first_tile = group * kTiles;
  const bool has_tokens = first_tile < args.token_tiles;
  const int expert = args.experts.tile_expert && has_tokens ? args.experts.tile_expert[first_tile] : 0;
  const bool is_active = tile < args.row_tiles && has_tokens && expert >= 0;
  const TileLayout& layout = args.layout;
  const uint8_t* const weight = args.weight + (is_active ? expert * args.expert_bytes + tile * layout.bytes : 0);
  const int units = (args.blocks + kUnit - 1) / kUnit, pairs = (args.blocks + 1) / 2;
  float4* const mine = handed_on + (threadIdx.z * kTiles) * 32 + lane;

  float total[kTiles][4] = {};
  CodePair<F> codes[kUnit / 2];
  const auto load_codes = [&](int unit) {
#pragma unroll
    for (int p = 0; p < kUnit / 2; ++p)
      if (unit * (kUnit / 2) + p < pairs) codes[p].load(weight, layout, unit * (kUnit / 2) + p, lane);
  };
  if (warp < units) load_codes(warp);
  for (int first = 0; first < units; first += warps) {
    const int unit = first + warp;
    const bool has_unit = is_active && unit < units;
    const int chunk_begin = kUnit == kChunkBlocks ? 0 : unit * kUnit % kChunkBlocks;
    const int count = has_unit ? min(kUnit, args.blocks - unit * kUnit) : 0;
    RowScales<F> scales[2];
    UnitSums<F, kTiles, kUnit> unit_sums;
    if (has_unit) {
      const uint8_t* const chunk = weight + layout.scales + int64_t(unit * kUnit / kChunkBlocks) * F::kChunkBytes;
      scales[0].load(chunk, g, args.unit);
      scales[1].load(chunk, g + 8, args.unit);
    }
#pragma unroll
    for (int i = 0; i < kUnit; ++i)
      if (i < count) {
        uint32_t a[4];
        if (i % 2 == 0)
          codes[i / 2].template unpack<0>(args.codebook, a);
        else
          codes[i / 2].template unpack<1>(args.codebook, a);
        dot_block<F, kTiles>(args, a, unit * kUnit + i, first_tile, lane, unit_sums.sums[i]);
      }
    if (unit + warps < units) load_codes(unit + warps);  // on their way while sums are added
    for (int turn = 0; turn < warps; ++turn) {
      if (turn == warp && has_unit) {
        if (warps > 1 && unit > 0)
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            const float4 sums = mine[n * 32];
            total[n][0] = sums.x, total[n][1] = sums.y, total[n][2] = sums.z, total[n][3] = sums.w;
          }
#pragma unroll
        for (int i = 0; i < kUnit; ++i)
          if (i < count)
            add_block<F, kTiles>(args, scales, unit * kUnit + i, chunk_begin + i, first_tile, lane, unit_sums.sums[i],
                                 total);
        if (warps > 1)
#pragma unroll
          for (int n = 0; n < kTiles; ++n)
            mine[n * 32] = make_float4(total[n][0], total[n][1], total[n][2], total[n][3]);
      }
      if (warps > 1) __syncthreads();
    }
  }
  if (!is_active || warp != (units - 1) % warps) return;
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

template <class F, int kTiles, int kUnit>
void launch_format(QuantizedLinearArgs args, int warps, int num_processors, cudaStream_t stream) {
  args.layout = tile_layout<F>(int64_t(args.blocks) * 32);
  const int groups = (args.token_tiles + kTiles - 1) / kTiles;
  args.groups_a_block = args.experts.tile_expert ? 1 : groups < 4 ? groups : 4;
  while (args.groups_a_block * warps > 8) warps /= 2;
  // With all of K in one warp, blocks are made of tiles instead, as long as there are enough of these.
  args.tiles_a_block = 1;
  while (warps * args.groups_a_block * args.tiles_a_block < 4 &&
         args.row_tiles / args.tiles_a_block > 2 * num_processors)
    args.tiles_a_block *= 2;
  const dim3 grid(unsigned((args.row_tiles + args.tiles_a_block - 1) / args.tiles_a_block),
                  unsigned((groups + args.groups_a_block - 1) / args.groups_a_block));
  const dim3 block(32, unsigned(warps), unsigned(args.tiles_a_block * args.groups_a_block));
  const size_t shared = warps > 1 ? block.z * kTiles * 32 * sizeof(float4) : 0;
  rv::launch(quantized_linear_kernel<F, kTiles, kUnit>, grid, block, shared, stream, args);
}

}  // namespace

template <class F>
void quantized_linear_of(const QuantizedLinearArgs& args, int warps, int num_processors, cudaStream_t stream) {
  constexpr int kMost = F::kHalved ? 4 : 8;  // tiles of tokens that registers hold the sums of
  if (args.token_tiles == 1 || args.experts.tile_expert)
    launch_format<F, 1, 8>(args, warps, num_processors, stream);
  else if (args.token_tiles <= 8)
    launch_format<F, 2, 4>(args, warps, num_processors, stream);
  else
    launch_format<F, kMost, 2>(args, 1, num_processors, stream);
}

}  // namespace rvllm::cuda
