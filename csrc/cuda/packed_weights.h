// How quantized weights lie on the device: as the tensor cores take them.
//
// Tiles of 16 rows; of a tile, all codes, then all scales. Codes go in pairs of blocks, 64 k. The 16 codes of a block
// that lane 4 g + t needs, in four registers of four bytes, are k 4t.. of row g, of row g + 8, and k 16 + 4t.. of
// both (mma.h). Registers r = 0..3 of block b = 0, 1 of a pair are packed into planes of [pairs][32 lanes] words:
//   8 bits    two planes of four words a pair: word r of block b
//   4 bits    four words: register 2 i in the low nibbles of word 2 b + i, register 2 i + 1 in the high ones
//   codebook  four words: the four codes of register 2 i in the low half of word 2 b + i, of 2 i + 1 in the high half
//   2 bits    two words: register r in bits 2 r of the bytes of word b
//   6 bits    word r < 3 (of block b words 2 b, 2 b + 1 of the low plane and word b of the high one): register r in the
//             six upper bits of its bytes, and in the two lower ones bits 2 r of register 3
//   fifth bit of 5, third of 3: one word, bit r + 4 b of a byte
// Codes whose zero is in the middle lie there with their top bit flipped, as signed numbers.
// Scales go in chunks of 8 blocks, for 16 rows: [16][8] values, or [16] of the super-block and [16][8 or 16] bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "quant.h"

namespace rvllm {

constexpr int kTileRows = 16;
constexpr int kChunkBlocks = 8;  // blocks whose scales lie together

template <int Bits, int Zero, Scales Kind, bool Codebook_ = false>
struct Format {
  static constexpr int kBits = Bits;
  static constexpr int kZero = Zero;
  static constexpr Scales kScales = Kind;
  static constexpr bool kCodebook = Codebook_;
  static constexpr bool kCentred = Zero == 1 << (Bits - 1);
  static constexpr bool kSigned = Bits == 8 || Codebook_ || Zero != 0;  // as unpacked
  static constexpr bool kHasMin = Kind == Scales::kDM || Kind == Scales::kSuper || Kind == Scales::kSuper16Min;
  static constexpr bool kSuper = Kind >= Scales::kSuperD;
  static constexpr bool kHalved = Kind >= Scales::kSuper16;
  // Words a lane reads for a pair of blocks: of the low plane and of the high one.
  static constexpr int kLowWords = Bits == 8 ? 8 : Bits >= 4 ? 4 : 2;
  static constexpr int kHighWords = Bits == 6 ? 2 : Bits == 5 || Bits == 3 ? 1 : 0;
  static constexpr int kHeaderBytes = !kSuper ? 0 : kHasMin ? 64 : 32;
  static constexpr int kChunkBytes = !kSuper  ? (kHasMin ? 512 : 256)
                                     : kHalved ? kHeaderBytes + 256
                                               : kHeaderBytes + (kHasMin ? 256 : 128);
};

using FormatQ4_0 = Format<4, 8, Scales::kD>;
using FormatQ4_1 = Format<4, 0, Scales::kDM>;
using FormatQ5_0 = Format<5, 16, Scales::kD>;
using FormatQ5_1 = Format<5, 0, Scales::kDM>;
using FormatQ8_0 = Format<8, 0, Scales::kD>;
using FormatQ2_K = Format<2, 0, Scales::kSuper16Min>;
using FormatQ3_K = Format<3, 4, Scales::kSuper16>;
using FormatQ4_K = Format<4, 0, Scales::kSuper>;
using FormatQ5_K = Format<5, 0, Scales::kSuper>;
using FormatQ6_K = Format<6, 32, Scales::kSuper16>;
using FormatTQ = Format<2, 1, Scales::kD>;  // TQ1_0, TQ2_0
using FormatIQ = Format<4, 0, Scales::kSuperD, true>;  // IQ1_S, IQ2_XXS, IQ3_XXS, IQ3_S, IQ4_XS
using FormatIQ16 = Format<4, 0, Scales::kSuper16, true>;  // IQ1_M, IQ2_XS, IQ2_S
using FormatIQ4_NL = Format<4, 0, Scales::kD, true>;
using FormatMXFP4 = Format<4, 0, Scales::kBF16D, true>;

// Calls f(Format) with the format of that number.
template <class F>
void with_format(int number, const F& f) {
  switch (number) {
    case 0: return f(FormatQ4_0());
    case 1: return f(FormatQ4_1());
    case 2: return f(FormatQ5_0());
    case 3: return f(FormatQ5_1());
    case 4: return f(FormatQ8_0());
    case 5: return f(FormatQ2_K());
    case 6: return f(FormatQ3_K());
    case 7: return f(FormatQ4_K());
    case 8: return f(FormatQ5_K());
    case 9: return f(FormatQ6_K());
    case 10: return f(FormatTQ());
    case 11: return f(FormatIQ());
    case 12: return f(FormatIQ16());
    case 13: return f(FormatIQ4_NL());
    case 14: return f(FormatMXFP4());
  }
}
constexpr int kNumFormats = 15;

// Where the parts of a tile lie, in bytes.
struct TileLayout {
  int64_t high, scales, bytes;
};

template <class F>
constexpr TileLayout tile_layout(int64_t k) {
  const int64_t pairs = (k + 63) / 64, chunks = (k + 32 * kChunkBlocks - 1) / (32 * kChunkBlocks);
  const int64_t high = pairs * 128 * F::kLowWords, scales = high + pairs * 128 * F::kHighWords;
  return {high, scales, scales + chunks * F::kChunkBytes};
}

// The number of the format of a quantized type.
int format_number(const TypeInfo& type);
int64_t packed_tile_bytes(int format, int64_t k);
// Packs rows [16 tile, 16 tile + 16) of a [n, k] matrix of the file; rows beyond n become zeros.
void pack_tile(const TypeInfo& type, const uint8_t* rows, int64_t n, int64_t k, int64_t tile, uint8_t* out);

}  // namespace rvllm
