// How the CPU backend keeps weights: repacked at load into tiles of 16 output columns.
//
// Quantized weights go in blocks of 16 columns x 32 k. The codes of a block, once unpacked to bytes, lie as
// [8 groups][16 columns][4 k]: a group is one 512-bit vector whose 32-bit lane c holds four consecutive k of column c,
// which is what a four-way byte dot product (VNNI, sdot, an AMX tile row) takes. Float weights lie as [k][16 columns].
// No STL here: the ISA files include it.
#pragma once

#include <stdint.h>

namespace rvllm {

constexpr int kTileCols = 16;
constexpr int kGroups = 8;                            // of 4 k in a block of 32
constexpr int kTileCodes = kTileCols * 32;            // codes in a block
constexpr int kMaxChunk = 8;                          // blocks unpacked at a time; a K-quant super-block

enum class PackedType : uint8_t { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K };
constexpr int kNumPackedTypes = 13;

// What belongs to the scales of a block of 32 k; every field has 16 entries, one a column.
enum class Scales : uint8_t {
  kD,           // f16 d                                              w = d (q - zero)
  kDM,          // f16 d, m                                           w = d q + m
  kSuper,       // super-block: f16 d, dmin; block: u8 scale, min     w = d scale q - dmin min
  kSuper16,     // super-block: f16 d; block: i8 scale[2]             w = d scale[k / 16] (q - zero)
  kSuper16Min,  // super-block: f16 d, dmin; block: u8 [2], low nibble scale, high nibble min
};

struct PackedFormat {
  int bits;       // of a code: 2, 3, 4, 5, 6 or 8
  int zero;       // subtracted from the code; 8-bit codes are signed instead
  Scales scales;

  constexpr bool has_min() const {
    return scales == Scales::kDM || scales == Scales::kSuper || scales == Scales::kSuper16Min;
  }
  constexpr bool is_super() const { return scales >= Scales::kSuper; }
  constexpr bool is_halved() const { return scales >= Scales::kSuper16; }  // sub-scales for 16 k, not 32
  constexpr int code_bytes() const { return kTileCodes * bits / 8; }
  constexpr int scale_bytes() const { return scales == Scales::kDM ? 64 : 32; }
  constexpr int block_bytes() const { return code_bytes() + scale_bytes(); }
  constexpr int header_bytes() const { return !is_super() ? 0 : scales == Scales::kSuper16 ? 32 : 64; }
  constexpr int chunk_blocks() const { return is_super() ? kMaxChunk : 1; }
  // Bytes from one chunk (a super-block, or a block where there is none) to the next.
  constexpr int chunk_bytes() const { return header_bytes() + chunk_blocks() * block_bytes(); }
};

constexpr PackedFormat kFormats[kNumPackedTypes] = {
    {}, {}, {},  // the float types have no codes
    {4, 8, Scales::kD},    {4, 0, Scales::kDM},       {5, 16, Scales::kD},      {5, 0, Scales::kDM},
    {8, 0, Scales::kD},    {2, 0, Scales::kSuper16Min}, {3, 4, Scales::kSuper16}, {4, 0, Scales::kSuper},
    {5, 0, Scales::kSuper}, {6, 32, Scales::kSuper16},
};

// Codes of a block in packed form. Bits 0-3 of a code (bits 0-1 of a 2- or 3-bit one) come first, the rest after:
//   8 bits         [8][64] bytes
//   4, 5, 6 bits   [4][64] bytes: low nibble group g, high nibble group g + 4
//   2, 3 bits      [2][64] bytes: bits 2j of row r: group 4 r + j
//   fifth bit (5), third bit (3)   [64] bytes: bit g: group g
//   bits 4-5 (6)   [2][64] bytes: bits 2j of row r: group 4 r + j

// One chunk of a tile, unpacked: what the dot products and the scaling read.
struct UnpackedChunk {
  alignas(64) uint8_t codes[kMaxChunk][kTileCodes];
  alignas(64) float d[kMaxChunk][kTileCols];            // D: d, or d x sub-scale where that is for 32 k
  alignas(64) float m[kMaxChunk][kTileCols];            // M: m, -dmin x sub-minimum, or -dmin (Q2_K)
  alignas(64) int32_t scale[kMaxChunk][2][kTileCols];   // sub-scales for 16 k
  alignas(64) int32_t min[kMaxChunk][2][kTileCols];     // sub-minima for 16 k
};

}  // namespace rvllm
