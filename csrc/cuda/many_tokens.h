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
  static constexpr int kPairs = kChunkBlocks / 2;  // of a chunk
  static constexpr int kChunkSlots = kWeightSlots < kPairs ? kWeightSlots : kPairs;  // of weights

  static __device__ __forceinline__ int weight_slot(int chunk, int pair) {  // pair: from the chunk's first on
    return (chunk + pair / kPairs) % (kWeightSlots / kChunkSlots) * kChunkSlots + pair % kChunkSlots;
  }

  uint4 codes[kWeightSlots][kTiles * (kLow + kHigh)];  // those of the low plane of each tile, then of the high one
  uint4 q[kRowSlots][2][kTokenTiles / 2][32];
  uint4 scale[kRowSlots][kHasHalfSums ? 2 : 1][2][kTokenTiles][4];  // scales, then sums of halves
  uint4 chunk_scales[kTiles][F::kChunkBytes / 16];  // of the next chunk, as they lie in memory
  typename BlockScales<F>::Chunk block_scales[2][kTiles];  // of two chunks, as blocks take them
};

// One thread's part in copying what a block needs to slots: the pair or chunk that comes next, or the n-th after it, at
// distances known when this is compiled.
template <class F, int kTiles>
struct ManyTokensCopies {
  using Shared = ManyTokensShared<F, kTiles>;
  static constexpr int kLow = kTiles * Shared::kLow, kHigh = kTiles * Shared::kHigh;
  static constexpr int kBlockScales = Shared::kTokenTiles * 4, kScales = 2 * kBlockScales;  // of a block and a pair
  static constexpr int kChunk = F::kChunkBytes / 16;
  static constexpr int kLowEach = (kLow + kManyTokensThreads - 1) / kManyTokensThreads;  // pieces of a thread
  static_assert(kHigh <= kManyTokensThreads && 2 * kScales == kManyTokensThreads);
  static_assert(Shared::kTokenTiles / 2 * 32 == kManyTokensThreads);
  const QuantizedLinearArgs& args;
  Shared& shared;
  int thread, first_row_tile;
  const uint4 *low[kLowEach], *high = nullptr, *q, *scale;
  int low_left, high_left, blocks_left, scale_left;  // pairs of weights, blocks of rows that are yet to be copied
  AsyncCopies copies;

  __device__ __forceinline__ const uint4* tile(int i, int64_t offset) const {  // beyond the last: the last, again
    const int64_t at = min(first_row_tile + i, args.row_tiles - 1) * args.layout.bytes + offset;
    return reinterpret_cast<const uint4*>(args.weight + at);
  }
  __device__ __forceinline__ ManyTokensCopies(const QuantizedLinearArgs& of, Shared& to, int me, int row_tile,
                                              int first_token_tile)
      : args(of), shared(to), thread(me), first_row_tile(row_tile), blocks_left(args.blocks) {
    const int pairs = (args.blocks + 1) / 2;
    low_left = kLow % kManyTokensThreads == 0 || thread < kLow ? pairs : 0;
    high_left = kHigh == kManyTokensThreads || thread < kHigh ? pairs : 0;
#pragma unroll
    for (int i = 0; i < kLowEach; ++i) {
      const int piece = thread + i * kManyTokensThreads;
      low[i] = tile(piece / Shared::kLow, 0) + piece % Shared::kLow;
    }
    if constexpr (kHigh > 0) high = tile(thread / Shared::kHigh, args.layout.high) + thread % Shared::kHigh;
    const int64_t place = args.x.place(first_token_tile, 0);
    q = args.x.q + place / 2 * 32 + thread;
    const uint4* const scales = thread < kScales ? reinterpret_cast<const uint4*>(args.x.scale)
                                                 : reinterpret_cast<const uint4*>(args.x.half_sum);
    scale = scales + place * 4 + thread % kScales;
    const bool has_scales = Shared::kHasHalfSums || thread < kScales;
    scale_left = has_scales ? args.blocks - thread % kScales / kBlockScales : 0;
  }
  __device__ __forceinline__ void weights(int slot, int n) {
#pragma unroll
    for (int i = 0; i < kLowEach; ++i)
      copies.copy(shared.codes[slot] + thread + i * kManyTokensThreads, low[i] + n * Shared::kLow, low_left > n);
    if constexpr (kHigh > 0)
      copies.copy(shared.codes[slot] + kLow + thread, high + n * Shared::kHigh, high_left > n);
  }
  __device__ __forceinline__ void rows(int slot, int n) {
    const int blocks = 2 * n;
    copies.copy(&shared.q[slot][0][0][0] + thread, q + blocks * kManyTokensThreads, blocks_left > blocks);
    copies.copy(&shared.q[slot][1][0][0] + thread, q + (blocks + 1) * kManyTokensThreads,
                blocks_left > blocks + !F::kSuper);  // super-blocks are whole pairs
    copies.copy(&shared.scale[slot][0][0][0][0] + thread, scale + n * kScales, scale_left > blocks);
  }
  __device__ __forceinline__ void advance(int pairs_of_weights, int pairs_of_rows) {
#pragma unroll
    for (int i = 0; i < kLowEach; ++i) low[i] += pairs_of_weights * Shared::kLow;
    if constexpr (kHigh > 0) high += pairs_of_weights * Shared::kHigh;
    low_left -= pairs_of_weights;
    high_left -= pairs_of_weights;
    q += pairs_of_rows * 2 * kManyTokensThreads;
    scale += pairs_of_rows * kScales;
    blocks_left -= pairs_of_rows * 2;
    scale_left -= pairs_of_rows * 2;
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

// What a lane reads of its block's shared memory, at fixed distances from a few addresses.
template <class F, int kTiles>
struct ManyTokensReads {
  using Shared = ManyTokensShared<F, kTiles>;
  using Chunk = typename BlockScales<F>::Chunk;
  static constexpr int kBlockRows = Shared::kTokenTiles / 2 * 32, kBlockScales = Shared::kTokenTiles * 4;
  const uint8_t *low, *high;  // of the first slot and the first of the warp's tiles, as are q and scale
  const uint4 *q, *scale;
  const Chunk* chunks;        // of the warp's tiles, one parity after the other
  int g;

  __device__ __forceinline__ ManyTokensReads(const Shared& shared, int row_tile, int token_tile, int lane)
      : q(&shared.q[0][0][token_tile / 2][lane]), scale(&shared.scale[0][0][0][token_tile][lane % 4]),
        chunks(&shared.block_scales[0][row_tile]), g(lane / 4) {
    const uint4* const codes = shared.codes[0];
    low = reinterpret_cast<const uint8_t*>(codes + row_tile * Shared::kLow) + lane * CodePair<F>::kLowBytes;
    high = reinterpret_cast<const uint8_t*>(codes + kTiles * Shared::kLow + row_tile * Shared::kHigh) +
           lane * CodePair<F>::kHighBytes;
  }
  __device__ __forceinline__ CodePair<F> codes(int slot, int tile) const {
    CodePair<F> pair;
    const int at = slot * int(sizeof(Shared::codes[0]));
    pair.load_shared(low + at + tile * Shared::kLow * 16, high + at + tile * Shared::kHigh * 16);
    return pair;
  }
  __device__ __forceinline__ BlockScales<F> scales(int parity, int tile, int block) const {
    return {chunks[parity * kTiles + tile], block, g};
  }
  __device__ __forceinline__ uint4 row_codes(int slot, int b, int tile) const {  // of a pair of tiles
    return q[(slot * 2 + b) * kBlockRows + tile / 2 * 32];
  }
  __device__ __forceinline__ float4 row_scales(int slot, int b, int tile) const {
    const uint4 s = scale_words(slot, 0, b, tile);
    return {__uint_as_float(s.x), __uint_as_float(s.y), __uint_as_float(s.z), __uint_as_float(s.w)};
  }
  __device__ __forceinline__ int4 half_sums(int slot, int b, int tile) const {
    if constexpr (!Shared::kHasHalfSums) return {0, 0, 0, 0};
    const uint4 h = scale_words(slot, 1, b, tile);
    return {int(h.x), int(h.y), int(h.z), int(h.w)};
  }

 private:
  __device__ __forceinline__ uint4 scale_words(int slot, int part, int b, int tile) const {
    return scale[((slot * (Shared::kHasHalfSums ? 2 : 1) + part) * 2 + b) * kBlockScales + tile * 4];
  }
};

// Adds pair i of a chunk to the sums of a warp.
template <class F, int kTiles>
__device__ __forceinline__ void add_pair(const uint4& codebook, const ManyTokensReads<F, kTiles>& from, int weight_slot,
                                         int slot, int parity, int i, bool is_whole, float (&total)[2][kTiles][4]) {
  const CodePair<F> codes[2] = {from.codes(weight_slot, 0), from.codes(weight_slot, 1)};
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    if (b == 1 && !is_whole) break;
    const BlockScales<F> w[2] = {from.scales(parity, 0, 2 * i + b), from.scales(parity, 1, 2 * i + b)};
    uint32_t a[2][4];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (b == 0)
        codes[r].template unpack<0>(codebook, a[r]);
      else
        codes[r].template unpack<1>(codebook, a[r]);
    uint4 x = {};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (n % 2 == 0) x = from.row_codes(slot, b, n);
      const float4 scale = from.row_scales(slot, b, n);
      const int4 half_sum = from.half_sums(slot, b, n);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int sums[kHalves<F>][4];
        dot<F>(a[r], n % 2 == 0 ? uint2{x.x, x.y} : uint2{x.z, x.w}, sums);
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

  ManyTokensCopies<F, kTiles> to(args, shared, thread, first_row_tile, first_token_tile);
  const ManyTokensReads<F, kTiles> from(shared, row_tile, token_tile, lane);
  constexpr int kAhead = Shared::kRowSlots - 1, kWeightsAhead = Shared::kWeightSlots - 1;
  to.chunk_scales(0);
#pragma unroll
  for (int pair = 0; pair < kWeightsAhead; ++pair) {
    to.weights(pair, pair);
    if (pair < kAhead) to.rows(pair, pair);
  }
  to.advance(kWeightsAhead, kAhead);
  to.copies.end_group();

  // Threads 8 i + g of a tile make the scales of its rows g and g + 8 for blocks i, i + kTogether.. of a chunk.
  const auto put_scales = [&](int parity) {
    constexpr int kTogether = kManyTokensThreads / kTiles / 8;
    const int tile = thread / (8 * kTogether), row = thread % 8;
    const uint8_t* const chunk = reinterpret_cast<const uint8_t*>(shared.chunk_scales[tile]);
#pragma unroll
    for (int first = 0; first < kChunkBlocks; first += kTogether) {
      const int block = first + thread / 8 % kTogether;
      Scale<F> low, high;
      low.load(chunk, row, block);
      high.load(chunk, row + 8, block);
      BlockScales<F>(low, high, args.unit).put(shared.block_scales[parity][tile], block, row);
    }
  };
  to.copies.template wait<0>();
  __syncthreads();
  put_scales(0);

  float total[2][kTiles][4] = {};
  for (int chunk = 0; chunk < chunks; ++chunk) {
#pragma unroll 1
    for (int first = 0; first < Shared::kPairs; first += Shared::kRowSlots) {
#pragma unroll
      for (int slot = 0; slot < Shared::kRowSlots; ++slot) {
        const int i = first + slot, pair = chunk * Shared::kPairs + i;
        if (!F::kSuper && pair >= pairs) break;  // super-blocks are whole chunks
        to.copies.template wait<kAhead - 1>();
        __syncthreads();
        to.weights(Shared::weight_slot(chunk, i + kWeightsAhead), slot);
        to.rows((slot + kAhead) % Shared::kRowSlots, slot);
        if (i == 0 && chunk + 1 < chunks) to.chunk_scales(chunk + 1);
        to.copies.end_group();
        if (is_active)
          add_pair<F, kTiles>(args.codebook, from, Shared::weight_slot(chunk, i), slot, chunk % 2, i,
                              F::kSuper || 2 * pair + 1 < args.blocks, total);
      }
      to.advance(Shared::kRowSlots, Shared::kRowSlots);
    }
    if (chunk + 1 < chunks) put_scales((chunk + 1) % 2);  // in place of those that were last read a chunk ago
  }
  if (!is_active) return;
#pragma unroll
  for (int r = 0; r < 2; ++r)
    Outputs<kTiles>(args, first_row_tile + row_tile + r, first_token_tile + token_tile).write(args, total[r]);
}

}  // namespace rvllm::cuda
