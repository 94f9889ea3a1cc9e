// How the CPU backend keeps weights: repacked at load into tiles of 16 output columns.
//
// Quantized weights go in blocks of 16 columns x 32 k. The codes of a block, once unpacked to bytes, lie as
// [8 groups][16 columns][4 k]: a group is one 512-bit vector whose 32-bit lane c holds four consecutive k of column c,
// which is what a four-way byte dot product (VNNI, sdot, an AMX tile row) takes. Float weights lie as [k][16 columns].
// No STL here: the ISA files include it.
#pragma once

#include <stdint.h>

#include "quant.h"

namespace rvllm {

constexpr int kTileCols = 16;
constexpr int kGroups = 8;                            // of 4 k in a block of 32
constexpr int kTileCodes = kTileCols * 32;            // codes in a block
constexpr int kMaxChunk = 8;                          // blocks unpacked at a time; a super-block

// Sizes of a format in tiles. Every scale has 16 entries, one a column.
struct PackedFormat : CodeFormat {
  constexpr PackedFormat() : CodeFormat{} {}
  constexpr PackedFormat(int bits, int zero, Scales scales) : CodeFormat{bits, zero, scales} {}

  constexpr int code_bytes() const { return kTileCodes * bits / 8; }
  constexpr int scale_bytes() const { return scales == Scales::kDM ? 64 : scales == Scales::kSuperD ? 16 : 32; }
  constexpr int block_bytes() const { return code_bytes() + scale_bytes(); }
  constexpr int header_bytes() const { return !is_super() ? 0 : has_min() ? 64 : 32; }
  constexpr int chunk_blocks() const { return is_super() ? kMaxChunk : 1; }
  // Bytes from one chunk (a super-block, or a block where there is none) to the next.
  constexpr int chunk_bytes() const { return header_bytes() + chunk_blocks() * block_bytes(); }
};

// A row of kFormats; ggml types with the same format share one.
enum class PackedType : uint8_t { F32, F16, BF16, kFirstQuantized };

constexpr PackedFormat kFormats[] = {
    {}, {}, {},                     // the float types have no codes
    {4, 8, Scales::kD},             // Q4_0
    {4, 0, Scales::kDM},            // Q4_1
    {5, 16, Scales::kD},            // Q5_0
    {5, 0, Scales::kDM},            // Q5_1
    {8, 0, Scales::kD},             // Q8_0
    {2, 0, Scales::kSuper16Min},    // Q2_K
    {3, 4, Scales::kSuper16},       // Q3_K
    {4, 0, Scales::kSuper},         // Q4_K
    {5, 0, Scales::kSuper},         // Q5_K
    {6, 32, Scales::kSuper16},      // Q6_K
    {2, 1, Scales::kD},             // TQ1_0, TQ2_0
    {3, kLookUp, Scales::kSuperD},  // IQ1_S, IQ2_XXS
    {3, kLookUp, Scales::kSuper16}, // IQ1_M, IQ2_XS, IQ2_S
    {4, kLookUp, Scales::kSuperD},  // IQ3_XXS, IQ3_S, IQ4_XS
    {4, kLookUp, Scales::kD},       // IQ4_NL
    {4, kLookUp, Scales::kBF16D},   // MXFP4
};
constexpr int kNumPackedTypes = sizeof(kFormats) / sizeof(*kFormats);

// Codes of a block in packed form. Bits 0-3 of a code (bits 0-1 of a 2- or 3-bit one) come first, the rest after:
//   8 bits         [8][64] bytes
//   4, 5, 6 bits   [4][64] bytes: low nibble group g, high nibble group g + 4
//   2, 3 bits      [2][64] bytes: bits 2j of row r: group 4 r + j
//   fifth bit (5), third bit (3)   [64] bytes: bit g: group g
//   bits 4-5 (6)   [2][64] bytes: bits 2j of row r: group 4 r + j

// One chunk of a tile, unpacked for products with many rows.
struct UnpackedChunk {
  alignas(64) uint8_t codes[kMaxChunk][kTileCodes];     // looked up, where there is a codebook
  alignas(64) float d[kMaxChunk][kTileCols];            // D: d, or d x sub-scale where that is for 32 k
  alignas(64) float m[kMaxChunk][kTileCols];            // M: m, -dmin x sub-minimum, or -dmin (Q2_K)
  alignas(64) int32_t scale[kMaxChunk][2][kTileCols];   // sub-scales for 16 k
  alignas(64) int32_t min[kMaxChunk][2][kTileCols];     // sub-minima for 16 k
};

}  // namespace rvllm
