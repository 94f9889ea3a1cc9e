// Products by many tokens: bound by the float operations of the scaling, 4 for each 32 products, so all else is done as
// rarely as possible. A warp makes 32 rows times 8 kTiles tokens, which reads fewer scales of activations than 16 rows
// by twice the tokens; a block's four warps read weights and activations from shared memory, where copies lie that were
// begun some pairs of blocks ahead, and the scales of weights are made there once for all of its tokens.
#pragma once

#include "cuda/async_copy.h"
#include "cuda/block_products.h"

namespace rvllm::cuda {

constexpr int kManyTokensThreads = 128;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kManyTokensBlocks = 1;  // Turing's shared memory holds one
#else
constexpr int kManyTokensBlocks = 2;
#endif

// A block makes 16 kTiles rows times 64 tokens. Where rows are few, kTiles is 2: a group of 16 tokens for each warp,
// and what is to come is copied long before, since few warps cover the time that it takes. Else it is 4 or 8.
template <class F, int kTiles>
struct ManyTokensShared {
  static constexpr int kTokenTiles = QuantizedRows::kTilesTogether;
  static constexpr int kLow = 8 * F::kLowWords, kHigh = 8 * F::kHighWords;  // of a pair of blocks, in 16 bytes
  static constexpr int kWeightSlots = kTiles == 2 ? 8 : 2, kRowSlots = kTiles == 2 ? 4 : 2;  // of pairs
  static constexpr bool kHasHalfSums = F::kHalved && F::kHasMin;

  uint4 codes[kWeightSlots][kTiles * (kLow + kHigh)];  // those of the low plane of each tile, then of the high one
  uint4 q[kRowSlots][2][kTokenTiles / 2][32];
  uint4 scale[kRowSlots][kHasHalfSums ? 2 : 1][2][kTokenTiles][4];  // scales, then sums of halves
  uint4 chunk_scales[kTiles][F::kChunkBytes / 16];  // of the next chunk, as they lie in memory
  uint4 block_scales[2][kTiles][kChunkBlocks][8];   // of two chunks, as blocks take them
};

// One thread's part in copying what a block needs, each next pair or chunk to a slot.
template <class F, int kTiles>
struct ManyTokensCopies {
  using Shared = ManyTokensShared<F, kTiles>;
  static constexpr int kLow = kTiles * Shared::kLow, kHigh = kTiles * Shared::kHigh;
  static constexpr int kScales = 2 * Shared::kTokenTiles * 4, kChunk = F::kChunkBytes / 16;
  static constexpr int kLowEach = (kLow + kManyTokensThreads - 1) / kManyTokensThreads;  // pieces of a thread
  static_assert(kHigh <= kManyTokensThreads && 2 * kScales == kManyTokensThreads);
  static_assert(Shared::kTokenTiles / 2 * 32 == kManyTokensThreads);
  const QuantizedLinearArgs& args;
  Shared& shared;
  int thread, first_row_tile;
  const uint4 *low[kLowEach], *high = nullptr, *q, *scale;
  int64_t row_stride;  // of a block
  AsyncCopies copies;

  __device__ __forceinline__ const uint4* tile(int i, int64_t offset) const {  // beyond the last: the last, again
    const int64_t at = min(first_row_tile + i, args.row_tiles - 1) * args.layout.bytes + offset;
    return reinterpret_cast<const uint4*>(args.weight + at);
  }
  __device__ __forceinline__ ManyTokensCopies(const QuantizedLinearArgs& of, Shared& to, int me, int row_tile,
                                              int first_token_tile)
      : args(of), shared(to), thread(me), first_row_tile(row_tile), row_stride(args.x.tiles) {
#pragma unroll
    for (int i = 0; i < kLowEach; ++i) {
      const int piece = thread + i * kManyTokensThreads;
      low[i] = tile(piece / Shared::kLow, 0) + piece % Shared::kLow;
    }
    if constexpr (kHigh > 0) high = tile(thread / Shared::kHigh, args.layout.high) + thread % Shared::kHigh;
    q = args.x.q + first_token_tile * 16 + thread;
    const uint4* const scales = thread < kScales ? reinterpret_cast<const uint4*>(args.x.scale)
                                                 : reinterpret_cast<const uint4*>(args.x.half_sum);
    scale = scales + (thread % kScales / (kScales / 2) * row_stride + first_token_tile) * 4 + thread % (kScales / 2);
  }
  __device__ __forceinline__ void weights(int slot, bool wanted) {
#pragma unroll
    for (int i = 0; i < kLowEach; ++i) {
      const int piece = thread + i * kManyTokensThreads;
      copies.copy(shared.codes[slot] + piece, low[i], wanted && (kLow % kManyTokensThreads == 0 || piece < kLow));
      low[i] += Shared::kLow;
    }
    if constexpr (kHigh > 0) {
      copies.copy(shared.codes[slot] + kLow + thread, high, wanted && (kHigh == kManyTokensThreads || thread < kHigh));
      high += Shared::kHigh;
    }
  }
  __device__ __forceinline__ void rows(int slot, bool wanted, bool is_whole) {  // is_whole: with both blocks
    copies.copy(&shared.q[slot][0][0][0] + thread, q, wanted);
    copies.copy(&shared.q[slot][1][0][0] + thread, q + row_stride * 16, wanted && is_whole);
    const bool has_scales = Shared::kHasHalfSums || thread < kScales;
    copies.copy(&shared.scale[slot][0][0][0][0] + thread, scale,
                wanted && has_scales && (is_whole || thread % kScales < kScales / 2));
    q += row_stride * 32;
    scale += row_stride * 8;
  }
  __device__ __forceinline__ void chunk_scales(int chunk) {
#pragma unroll
    for (int i = 0; i < kTiles * kChunk; i += kManyTokensThreads) {
      const int piece = min(i + thread, kTiles * kChunk - 1);
      copies.copy(&shared.chunk_scales[0][0] + piece,
                  tile(piece / kChunk, args.layout.scales) + int64_t(chunk) * kChunk + piece % kChunk,
                  i + thread < kTiles * kChunk);
    }
  }
};

// Adds pair i of a chunk to the sums of a warp: tiles of rows and of tokens of the block from these on.
template <class F, int kTiles>
__device__ __forceinline__ void add_pair(const QuantizedLinearArgs& args, const ManyTokensShared<F, kTiles>& shared,
                                         int weight_slot, int slot, int parity, int i, bool is_whole, int row_tile,
                                         int token_tile, int lane, float (&total)[2][kTiles][4]) {
  using Shared = ManyTokensShared<F, kTiles>;
  CodePair<F> codes[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    codes[r].load_shared(shared.codes[weight_slot] + (row_tile + r) * Shared::kLow,
                         shared.codes[weight_slot] + kTiles * Shared::kLow + (row_tile + r) * Shared::kHigh, lane);
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    if (b == 1 && !is_whole) break;
    const auto scales_of = [&](int r) {
      return BlockScales<F>::unpacked(shared.block_scales[parity][row_tile + r][2 * i + b][lane / 4], args.unit);
    };
    const BlockScales<F> w[2] = {scales_of(0), scales_of(1)};
    uint32_t a[2][4];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (b == 0)
        codes[r].template unpack<0>(args.codebook, a[r]);
      else
        codes[r].template unpack<1>(args.codebook, a[r]);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const uint4 q = shared.q[slot][b][(token_tile + n) / 2][lane];
      const uint4 s = shared.scale[slot][0][b][token_tile + n][lane % 4];
      const float4 scale = {__uint_as_float(s.x), __uint_as_float(s.y), __uint_as_float(s.z), __uint_as_float(s.w)};
      int4 half_sum = {0, 0, 0, 0};
      if constexpr (Shared::kHasHalfSums) {
        const uint4 h = shared.scale[slot][1][b][token_tile + n][lane % 4];
        half_sum = {int(h.x), int(h.y), int(h.z), int(h.w)};
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int sums[kHalves<F>][4];
        dot<F>(a[r], n % 2 == 0 ? uint2{q.x, q.y} : uint2{q.z, q.w}, sums);
        add_block<F>(w[r], scale, half_sum, sums, total[r][n]);
      }
    }
  }
}

// grid: [tiles of rows / kTiles, tiles of tokens / 8]; block: [32, 4].
template <class F, int kTiles>
__global__ void __launch_bounds__(kManyTokensThreads, kManyTokensBlocks) many_tokens_kernel(QuantizedLinearArgs args) {
  using Shared = ManyTokensShared<F, kTiles>;
  RV_DYN_SHARED(Shared, dynamic_shared);
  Shared& shared = *dynamic_shared;
  constexpr int kGroups = Shared::kTokenTiles / kTiles;  // of tokens
  // Through a shuffle, so that the compiler knows it to be the same for a warp: what hangs on it is no divergence then.
  const int lane = threadIdx.x, warp = __shfl_sync(kFullWarp, int(threadIdx.y), 0), thread = warp * 32 + lane;
  const int first_row_tile = int(blockIdx.x) * kTiles, first_token_tile = int(blockIdx.y) * Shared::kTokenTiles;
  const int row_tile = warp / kGroups * 2, token_tile = warp % kGroups * kTiles;  // of the block
  const int pairs = (args.blocks + 1) / 2, chunks = (args.blocks + kChunkBlocks - 1) / kChunkBlocks;
  const bool is_active =
      first_row_tile + row_tile < args.row_tiles && first_token_tile + token_tile < args.token_tiles;

  ManyTokensCopies<F, kTiles> from(args, shared, thread, first_row_tile, first_token_tile);
  constexpr int kAhead = Shared::kRowSlots - 1, kWeightsAhead = Shared::kWeightSlots - 1;
  from.chunk_scales(0);
  for (int pair = 0; pair < kWeightsAhead; ++pair) {
    from.weights(pair, pair < pairs);
    if (pair < kAhead) from.rows(pair, pair < pairs, F::kSuper || 2 * pair + 1 < args.blocks);
  }
  from.copies.end_group();

  // Threads 8 i + g of a tile make the scales of its rows g and g + 8 for blocks i, i + kTogether.. of a chunk.
  const auto put_scales = [&](int parity) {
    constexpr int kTogether = kManyTokensThreads / kTiles / 8;
    const int tile = thread / (8 * kTogether), row = thread % 8;
    const uint8_t* const chunk = reinterpret_cast<const uint8_t*>(shared.chunk_scales[tile]);
#pragma unroll
    for (int block = thread / 8 % kTogether; block < kChunkBlocks; block += kTogether) {
      Scale<F> low, high;
      low.load(chunk, row, block);
      high.load(chunk, row + 8, block);
      shared.block_scales[parity][tile][block][row] = BlockScales<F>::packed(low, high, args.unit);
    }
  };
  from.copies.template wait<0>();
  __syncthreads();
  put_scales(0);

  float total[2][kTiles][4] = {};
  for (int chunk = 0; chunk < chunks; ++chunk) {
#pragma unroll 1
    for (int first = 0; first < kChunkBlocks / 2; first += Shared::kRowSlots) {
#pragma unroll
      for (int slot = 0; slot < Shared::kRowSlots; ++slot) {
        const int i = first + slot, pair = chunk * (kChunkBlocks / 2) + i;
        if (!F::kSuper && pair >= pairs) break;  // super-blocks are whole chunks
        from.copies.template wait<kAhead - 1>();
        __syncthreads();
        from.weights((pair + kWeightsAhead) % Shared::kWeightSlots, pair + kWeightsAhead < pairs);
        from.rows((slot + kAhead) % Shared::kRowSlots, pair + kAhead < pairs,
                  F::kSuper || 2 * (pair + kAhead) + 1 < args.blocks);
        if (i == 0 && chunk + 1 < chunks) from.chunk_scales(chunk + 1);
        from.copies.end_group();
        if (is_active)
          add_pair<F, kTiles>(args, shared, pair % Shared::kWeightSlots, slot, chunk % 2, i,
                              F::kSuper || 2 * pair + 1 < args.blocks, row_tile, token_tile, lane, total);
      }
    }
    if (chunk + 1 < chunks) put_scales((chunk + 1) % 2);  // in place of those that were last read a chunk ago
  }
  if (!is_active) return;
#pragma unroll
  for (int r = 0; r < 2; ++r)
    Outputs<kTiles>(args, first_row_tile + row_tile + r, first_token_tile + token_tile).write(args, total[r]);
}

}  // namespace rvllm::cuda
