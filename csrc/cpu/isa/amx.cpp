// AVX-512 with VNNI, and int8 tiles for linear with 16 rows or more. The integers of a tile are the same as VNNI's and
// their scaling is linear_kernels.inl's, so the bits are too.
#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#include "cpu/kernels.h"

namespace rvllm {
namespace {
#include "cpu/isa/vec_avx512.h"
#include "cpu/linear_kernels.inl"
#include "cpu/isa/tiles.h"

template <int I>
struct Int {
  static constexpr int value = I;
};

constexpr int kTilesInFlight = 4;
constexpr int kLeastTileRows = 6;  // a tile costs about as much as VNNI takes for this many rows

// dots[i] = 16 rows of a, from k = i * Depth on, times the codes of these k; for i < count, all in flight together.
// stride: from one block of 32 k of a to the next.
template <int Depth>
inline void dot_tiles(const uint8_t* codes, const int8_t* a, int64_t stride, int count, int32_t (*dots)[256]) {
  constexpr int kCodes = kTileCols * Depth;
  const auto start = [&](auto i) {
    constexpr int kTile = decltype(i)::value, kA = 4 + kTile % 2, kB = 6 + kTile % 2;
    if (kTile >= count) return;
    tile_load<kA>(a + kTile * Depth / 32 * stride + kTile * Depth % 32, 32);
    tile_load<kB>(codes + kTile * kCodes, 64);
    tile_zero<kTile>();
    tile_dot<kTile, kA, kB>();
  };
  start(Int<0>());
  start(Int<1>());
  start(Int<2>());
  start(Int<3>());
  tile_store<0>(dots[0], 64);
  tile_store<1>(dots[1], 64);
  tile_store<2>(dots[2], 64);
  tile_store<3>(dots[3], 64);
}

// sums[r] += blocks [first, first + blocks) of row `row` + r, for `rows` rows of which the first 16 n are multiplied by
// tiles, and so is the rest where it is worth one: together with rows before it, whose products are then thrown away.
// Returns the rows done.
template <int Type>
int multiply_tiles(const UnpackedChunk& u, int first, int blocks, const LinearArgs& args, int row, int rows,
                   float* sums) {
  constexpr PackedFormat f = kFormats[Type];
  constexpr int kDepth = f.is_halved() ? 16 : 32;
  constexpr int kGroup = kTilesInFlight * kDepth / 32;  // blocks
  const int done = rows % kTileRows >= kLeastTileRows ? rows : rows - rows % kTileRows;
  const int groups = (blocks + kGroup - 1) / kGroup;
  const int steps = (done + kTileRows - 1) / kTileRows * groups;
  alignas(64) int32_t dots[2][kTilesInFlight][kTileRows * kTileCols];

  const auto first_row = [&](int step) {  // of the tile, from `row` on
    const int r = step / groups * kTileRows;
    return r + kTileRows <= done ? r : done - kTileRows;
  };
  const auto multiply_step = [&](int step) {
    const int b = step % groups * kGroup;
    const int count = blocks - b < kGroup ? (blocks - b) * 32 / kDepth : kTilesInFlight;
    dot_tiles<kDepth>(u.codes[b], args.xq.q + 32 * args.xq.at(first + b, row + first_row(step)), 32 * args.xq.rows,
                      count, dots[step % 2]);
  };
  const auto scale_step = [&](int step) {
    const int b0 = step % groups * kGroup, tile_row = first_row(step);
    const int count = blocks - b0 < kGroup ? blocks - b0 : kGroup;
    for (int r = step / groups * kTileRows - tile_row; r < kTileRows; ++r) {
      const int32_t* dot = dots[step % 2][0] + r * kTileCols;
      float* const at = sums + (tile_row + r) * kTileCols;
      Vec sum = load(at);
      for (int b = b0; b < b0 + count; ++b) {
        const IVec low = iload(dot);
        dot += kTileRows * kTileCols;
        IVec high = low;
        if (f.is_halved()) {
          high = iload(dot);
          dot += kTileRows * kTileCols;
        }
        const BlockScales scales = UnpackedBlocks<Type>{u}.scales(b);
        sum = accumulate<Type>(scales, low, high, args.xq, args.xq.at(first + b, row + tile_row + r), sum);
      }
      store(at, sum);
    }
  };
  if (steps == 0) return 0;
  multiply_step(0);
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) multiply_step(step + 1);  // tiles work while vectors scale
    scale_step(step);
  }
  return done;
}

template <int Type>
void linear_tiles(const LinearArgs& args, int begin, int end) {
  if (args.rows < kTileRows) return kernels_avx512_vnni().linear[Type](args, begin, end);
  use_tiles(kFormats[Type].is_halved() ? 16 : 32);
  linear_quantized<Type, kLeastTileRows - 1>(args, begin, end, multiply_tiles<Type>);
  release_tiles();
}

void dot_products_by_tiles(const uint8_t* codes, const int8_t* x, float* out) {
  alignas(64) int32_t dots[kRowBlock * kTileCols];
  use_tiles(32);
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  for (int b = 0; b < kMaxChunk; ++b) {
    const int8_t* a = x + 32 * kRowBlock * b;
    tile_load<6>(codes + b * kTileCodes, 64);
    tile_load<4>(a, 32);
    tile_dot<0, 4, 6>();
    tile_load<5>(a + 32 * 16, 32);
    tile_dot<1, 5, 6>();
    tile_load<4>(a + 32 * 32, 32);
    tile_dot<2, 4, 6>();
    tile_load<5>(a + 32 * 48, 32);
    tile_dot<3, 5, 6>();
  }
  tile_store<0>(dots, 64);
  tile_store<1>(dots + 256, 64);
  tile_store<2>(dots + 512, 64);
  tile_store<3>(dots + 768, 64);
  release_tiles();
  for (int r = 0; r < kRowBlock; ++r) store(out + r * kTileCols, to_float(iload(dots + r * kTileCols)));
}

template <int Type = int(PackedType::kFirstQuantized)>
void replace_linear(Kernels& table) {
  table.linear[Type] = &linear_tiles<Type>;
  if constexpr (Type + 1 < kNumPackedTypes) replace_linear<Type + 1>(table);
}

Kernels make_amx_table() noexcept {
  Kernels table = kernels_avx512_vnni();
  table.name = "amx";
  table.dot_products = &dot_products_by_tiles;
  replace_linear(table);
  return table;
}
}  // namespace

const Kernels& kernels_amx() noexcept {
  static const Kernels table = make_amx_table();
  return table;
}

}  // namespace rvllm
#endif
