// out = x W^T + bias for quantized weights, on the integer units of the tensor cores. Exact: every float operation is
// one of csrc/cpu/linear_kernels.inl in the same order, whatever the number of tokens and however the work is cut.
//
// A warp owns 16 rows of W times 8 kTiles tokens; blocks of 32 k follow in ascending order. Reads of W are 16 bytes a
// lane and coalesced. Two kernels: where there are too few warps to keep memory busy, several share the outputs of one;
// where tokens are many, each has 64 of its own, so that what is done once for a row counts little. Included by the
// files that make the kernels of some formats each.
#include "cuda/mma.h"
#include "cuda/quantized_linear.h"
#include "cuda/unpack.h"

namespace rvllm::cuda {
namespace {

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

// Of rows g and g + 8 in one block.
template <class F>
struct BlockScales {
  float d[2], m[2];
  int scale[2][2], min[2][2];  // of the halves, where F::kHalved

  __device__ __forceinline__ BlockScales(const RowScales<F> (&rows)[2], int block) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      d[row] = rows[row].d(block);
      m[row] = rows[row].m(block);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scale[row][half] = F::kHalved ? rows[row].scale(block, half) : 0;
        min[row][half] = F::kHalved && F::kHasMin ? rows[row].min(block, half) : 0;
      }
    }
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

// Which outputs a warp makes: 16 rows, kTiles tiles of tokens. grid: [tiles of rows / tiles a block, groups of tokens /
// groups a block]; block: [32, warps that share K, tiles of rows x groups of tokens].
template <int kTiles>
struct Outputs {
  int tile, first_tile, expert;
  bool is_active;
  const uint8_t* weight;  // of the tile

  __device__ __forceinline__ explicit Outputs(const QuantizedLinearArgs& args) {
    tile = blockIdx.x * args.tiles_a_block + threadIdx.z % args.tiles_a_block;
    first_tile = int(blockIdx.y * args.groups_a_block + threadIdx.z / args.tiles_a_block) * kTiles;
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

// blockDim.y warps share K: each reads every blockDim.y-th unit of it and makes its integer sums at once, then they add
// their units to the float sums in turn, handing these on through shared memory. kUnit: blocks of 32 k that a warp adds
// in one turn; it divides kChunkBlocks. Bound by memory up to some 16 tokens.
template <class F, int kTiles, int kUnit>
__global__ void __launch_bounds__(256, 1) few_tokens_kernel(QuantizedLinearArgs args) {
  RV_DYN_SHARED(float4, handed_on);  // [blockDim.z, kTiles, 32]
  const Outputs<kTiles> outputs(args);
  const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y, stride = args.x.tiles;
  const int units = (args.blocks + kUnit - 1) / kUnit, pairs = (args.blocks + 1) / 2;
  float4* const mine = handed_on + (threadIdx.z * kTiles) * 32 + lane;
  const uint4* const x_codes = args.x.q + outputs.first_tile / 2 * 32 + lane;
  const int x_at = outputs.first_tile * 4 + lane % 4;

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
    const int chunk_begin = kUnit == kChunkBlocks ? 0 : unit * kUnit % kChunkBlocks;
    const int count = has_unit ? min(kUnit, args.blocks - unit * kUnit) : 0;
    RowScales<F> scales[2];
    float4 x_scales[kUnit][kTiles];
    int sums[kUnit][kTiles][kHalves<F>][4];
    if (has_unit) {
      const uint8_t* const chunk =
          outputs.weight + args.layout.scales + int64_t(unit * kUnit / kChunkBlocks) * F::kChunkBytes;
      scales[0].load(chunk, lane / 4, args.unit);
      scales[1].load(chunk, lane / 4 + 8, args.unit);
    }
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      if (i >= count) break;
      const int64_t block = unit * kUnit + i;
      uint2 b[kTiles];
      load_tiles<kTiles>(x_codes + block * (stride / 2) * 32, outputs.first_tile % 2, b);
      uint32_t a[4];
      if (i % 2 == 0)
        codes[i / 2].template unpack<0>(args.codebook, a);
      else
        codes[i / 2].template unpack<1>(args.codebook, a);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        x_scales[i][n] = __ldg(args.x.scale + (block * stride + n) * 4 + x_at);
        dot<F>(a, b[n], sums[i][n]);
      }
    }
    if (unit + warps < units) load_codes(unit + warps);  // on their way while sums are added
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
          if (i < count) {
            const BlockScales<F> w(scales, chunk_begin + i);
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
              int4 half_sum = {0, 0, 0, 0};
              if constexpr (F::kHalved && F::kHasMin)
                half_sum = __ldg(args.x.half_sum + (int64_t(unit * kUnit + i) * stride + n) * 4 + x_at);
              add_block<F>(w, x_scales[i][n], half_sum, sums[i][n], total[n]);
            }
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

// Each warp goes through all of K. Bound by the float operations of the scaling: 4 for each 32 products.
template <class F, int kTiles>
__global__ void __launch_bounds__(128, 3) many_tokens_kernel(QuantizedLinearArgs args) {
  const Outputs<kTiles> outputs(args);
  if (!outputs.is_active) return;
  const int lane = threadIdx.x, last_pair = (args.blocks + 1) / 2 - 1;
  const int stride = args.x.tiles;
  const uint4* x_codes = args.x.q + outputs.first_tile / 2 * 32 + lane;
  const float4* x_scales = args.x.scale + outputs.first_tile * 4 + lane % 4;
  const int4* x_sums = args.x.half_sum + outputs.first_tile * 4 + lane % 4;
  const uint8_t* chunk = outputs.weight + args.layout.scales;

  float total[kTiles][4] = {};
  CodePair<F> codes, next;
  next.load(outputs.weight, args.layout, 0, lane);
  for (int first = 0; first < args.blocks; first += kChunkBlocks, chunk += F::kChunkBytes) {
    RowScales<F> scales[2];
    scales[0].load(chunk, lane / 4, args.unit);
    scales[1].load(chunk, lane / 4 + 8, args.unit);
#pragma unroll 1
    for (int i = 0; i < kChunkBlocks; ++i) {  // one at a time: reads made earlier would take too many registers
      if (!F::kSuper && first + i >= args.blocks) break;  // super-blocks are whole chunks
      uint32_t a[4];
      if (i % 2 == 0) {
        codes = next;
        next.load(outputs.weight, args.layout, min((first + i) / 2 + 1, last_pair), lane);
        codes.template unpack<0>(args.codebook, a);
      } else {
        codes.template unpack<1>(args.codebook, a);
      }
      uint2 b[kTiles];
      load_tiles<kTiles>(x_codes, false, b);
      const BlockScales<F> w(scales, i);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        int sums[kHalves<F>][4];
        dot<F>(a, b[n], sums);
        int4 half_sum = {0, 0, 0, 0};
        if constexpr (F::kHalved && F::kHasMin) half_sum = __ldg(x_sums + n * 4);
        add_block<F>(w, __ldg(x_scales + n * 4), half_sum, sums, total[n]);
      }
      x_codes += stride / 2 * 32;
      x_scales += stride * 4;
      x_sums += stride * 4;
    }
  }
  outputs.write(args, total);
}

template <class F, int kTiles, int kUnit>
void launch_few(QuantizedLinearArgs args, int warps, int num_processors, cudaStream_t stream) {
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
  rv::launch(few_tokens_kernel<F, kTiles, kUnit>, grid, block, shared, stream, args);
}

}  // namespace

template <class F>
void quantized_linear_of(const QuantizedLinearArgs& of_any, int warps, int num_processors, cudaStream_t stream) {
  QuantizedLinearArgs args = of_any;
  args.layout = tile_layout<F>(int64_t(args.blocks) * 32);
  constexpr int kTiles = QuantizedRows::kTilesTogether;
  const int groups = (args.token_tiles + kTiles - 1) / kTiles;
  if (args.token_tiles == 1 || args.experts.tile_expert)
    return launch_few<F, 1, 8>(args, warps, num_processors, stream);
  // A warp for each of a processor's four schedulers, and more than two tiles of tokens to make it worth it.
  if (args.token_tiles <= 2 || int64_t(args.row_tiles) * groups < 4 * num_processors)
    return launch_few<F, 2, 4>(args, warps, num_processors, stream);
  args.tiles_a_block = 4;  // which share their reads of activations
  args.groups_a_block = 1;
  const dim3 grid(unsigned((args.row_tiles + args.tiles_a_block - 1) / args.tiles_a_block), unsigned(groups));
  rv::launch(many_tokens_kernel<F, kTiles>, grid, dim3(32, 1, unsigned(args.tiles_a_block)), 0, stream, args);
}

}  // namespace rvllm::cuda
