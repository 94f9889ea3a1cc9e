#include "cuda/packed_weights.h"

#include <algorithm>
#include <cstring>

namespace rvllm {
namespace {

void set_bits(uint8_t* words, int64_t word, int bit, uint32_t value) {
  uint32_t w;
  std::memcpy(&w, words + 4 * word, 4);
  w |= value << bit;
  std::memcpy(words + 4 * word, &w, 4);
}

// The code of weight k of block `block` in row `row`.
template <class F>
void pack_code(uint8_t* tile, const TileLayout& layout, int row, int64_t block, int k, uint32_t q) {
  const int r = (row >= 8) + 2 * (k >= 16), byte = k % 4, b = int(block % 2);
  const int64_t lane = block / 2 * 32 + row % 8 * 4 + k % 16 / 4;  // of all lanes of all pairs
  uint8_t* const high = tile + layout.high;
  if (F::kCentred) q ^= F::kZero;
  if constexpr (F::kBits == 8) {
    tile[((block / 2 * 2 + b) * 32 + lane % 32) * 16 + 4 * r + byte] = uint8_t(q);
  } else if constexpr (F::kCodebook) {
    set_bits(tile, 4 * lane + 2 * b + r / 2, 16 * (r % 2) + 4 * byte, q);
  } else if constexpr (F::kBits == 6) {
    const auto set_word = [&](int i, int bit, uint32_t value) {
      set_bits(i < 2 ? tile : high, i < 2 ? 4 * lane + 2 * b + i : 2 * lane + b, 8 * byte + bit, value);
    };
    if (r < 3) set_word(r, 2, q);
    for (int i = 0; r == 3 && i < 3; ++i) set_word(i, 0, q >> 2 * i & 3);
  } else if constexpr (F::kBits >= 4) {
    set_bits(tile, 4 * lane + 2 * b + r / 2, 8 * byte + 4 * (r % 2), q & 15);
    if constexpr (F::kBits == 5) set_bits(high, lane, 8 * byte + r + 4 * b, q >> 4);
  } else {
    set_bits(tile, 2 * lane + b, 8 * byte + 2 * r, q & 3);
    if constexpr (F::kBits == 3) set_bits(high, lane, 8 * byte + r + 4 * b, q >> 2);
  }
}

void put16(uint8_t* p, int64_t index, uint16_t value) { std::memcpy(p + 2 * index, &value, 2); }

// The scales of block `sub` of a decoded block of the file, the block `at` of its chunk.
template <class F>
void pack_scales(uint8_t* chunk, int row, int at, int sub, const Codes& codes) {
  if constexpr (!F::kSuper) {
    put16(chunk, row * kChunkBlocks + at, codes.d);
    if constexpr (F::kHasMin) put16(chunk + 256, row * kChunkBlocks + at, codes.dmin);
    return;
  }
  put16(chunk, F::kHasMin ? 2 * row : row, codes.d);
  if constexpr (F::kHasMin) put16(chunk, 2 * row + 1, codes.dmin);
  uint8_t* const bytes = chunk + F::kHeaderBytes;
  if constexpr (!F::kHalved) {
    bytes[row * kChunkBlocks + at] = uint8_t(codes.scale[sub]);
    if constexpr (F::kHasMin) bytes[128 + row * kChunkBlocks + at] = codes.min[sub];
  } else {
    for (int half = 0; half < 2; ++half) {
      const int scale = codes.scale[2 * sub + half], min = F::kHasMin ? codes.min[2 * sub + half] << 4 : 0;
      bytes[row * 16 + 2 * at + half] = uint8_t(scale | min);
    }
  }
}

template <class F>
void pack(const TypeInfo& type, const uint8_t* rows, int64_t n, int64_t k, int64_t tile, uint8_t* out) {
  const TileLayout layout = tile_layout<F>(k);
  const int64_t row_bytes = k / type.block_size * type.block_bytes, first = tile * kTileRows;
  const int blocks = type.block_size / 32;
  std::memset(out, 0, size_t(layout.bytes));
  Codes codes;
  for (int row = 0; row < int(std::min<int64_t>(kTileRows, n - first)); ++row) {
    const uint8_t* p = rows + (first + row) * row_bytes;
    for (int64_t block = 0; block < k / 32; block += blocks, p += type.block_bytes) {
      type.decode(p, codes);
      for (int sub = 0; sub < blocks; ++sub) {
        for (int i = 0; i < 32; ++i) pack_code<F>(out, layout, row, block + sub, i, codes.q[32 * sub + i]);
        pack_scales<F>(out + layout.scales + (block + sub) / kChunkBlocks * F::kChunkBytes, row,
                       int((block + sub) % kChunkBlocks), sub, codes);
      }
    }
  }
}

}  // namespace

int format_number(const TypeInfo& type) {
  int found = -1;
  for (int i = 0; i < kNumFormats; ++i)
    with_format(i, [&](auto format) {
      using F = decltype(format);
      const bool same = F::kScales == type.format.scales && F::kCodebook == type.format.has_codebook();
      if (same && (F::kCodebook || (F::kBits == type.format.bits && F::kZero == type.format.zero))) found = i;
    });
  return found;
}

int64_t packed_tile_bytes(int format, int64_t k) {
  int64_t bytes = 0;
  with_format(format, [&](auto f) { bytes = tile_layout<decltype(f)>(k).bytes; });
  return bytes;
}

void pack_tile(const TypeInfo& type, const uint8_t* rows, int64_t n, int64_t k, int64_t tile, uint8_t* out) {
  with_format(format_number(type), [&](auto f) { pack<decltype(f)>(type, rows, n, k, tile, out); });
}

}  // namespace rvllm
