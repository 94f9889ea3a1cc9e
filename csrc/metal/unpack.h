// Reads the layout of cuda/packed_weights.h.
#pragma once

#include "metal/device_math.h"

constant int kTileRows = 16;
constant int kChunkBlocks = 8;

enum ScalesKind : int { kD, kBF16D, kDM, kSuperD, kSuper, kSuper16, kSuper16Min };  // Scales of quant.h

template <int Bits, int Zero, int Kind, int Codebook = 0>
struct Format {
  enum : int {
    kBits = Bits,
    kZero = Zero,
    kScales = Kind,
    kCodebook = Codebook,
    kCentred = Zero == 1 << (Bits - 1),
    kSigned = Bits == 8 || Codebook != 0,
    kHasMin = Kind == kDM || Kind == kSuper || Kind == kSuper16Min,
    kIsSuper = Kind >= kSuperD,
    kHalved = Kind >= kSuper16,
    kHeaderBytes = !(Kind >= kSuperD) ? 0 : Kind == kSuper || Kind == kSuper16Min ? 64 : 32,
    kChunkBytes = Kind == kDM ? 512
                  : Kind < kSuperD ? 256
                  : Kind == kSuperD ? 160
                  : Kind == kSuper ? 320
                  : Kind == kSuper16 ? 288 : 320
  };
};

typedef Format<4, 8, kD> FormatQ4_0;
typedef Format<4, 0, kDM> FormatQ4_1;
typedef Format<5, 16, kD> FormatQ5_0;
typedef Format<5, 0, kDM> FormatQ5_1;
typedef Format<8, 0, kD> FormatQ8_0;
typedef Format<2, 0, kSuper16Min> FormatQ2_K;
typedef Format<3, 4, kSuper16> FormatQ3_K;
typedef Format<4, 0, kSuper> FormatQ4_K;
typedef Format<5, 0, kSuper> FormatQ5_K;
typedef Format<6, 32, kSuper16> FormatQ6_K;
typedef Format<2, 1, kD> FormatTQ;
typedef Format<4, 0, kSuperD, 1> FormatIQ;
typedef Format<4, 0, kSuper16, 1> FormatIQ16;
typedef Format<4, 0, kD, 1> FormatIQ4_NL;
typedef Format<4, 0, kBF16D, 1> FormatMXFP4;
struct FloatF32 {};
struct FloatF16 {};
struct FloatBF16 {};

// What one lane reads of a pair of blocks.
template <class F>
inline void load_codes(device const uchar* tile, constant MatrixArgs& m, int pair, int lane, thread uint (&low)[8],
                       thread uint (&high)[2]) {
  if (F::kBits == 8) {
    device const uint4* words = (device const uint4*)tile + pair * 64 + lane;
    const uint4 first = words[0], second = words[32];
    low[0] = first.x, low[1] = first.y, low[2] = first.z, low[3] = first.w;
    low[4] = second.x, low[5] = second.y, low[6] = second.z, low[7] = second.w;
  } else if (F::kBits >= 4) {
    const uint4 words = ((device const uint4*)tile)[pair * 32 + lane];
    low[0] = words.x, low[1] = words.y, low[2] = words.z, low[3] = words.w;
  } else {
    const uint2 words = ((device const uint2*)tile)[pair * 32 + lane];
    low[0] = words.x, low[1] = words.y;
  }
  if (F::kBits == 6) {
    const uint2 words = ((device const uint2*)(tile + m.high))[pair * 32 + lane];
    high[0] = words.x, high[1] = words.y;
  } else if (F::kBits == 5 || F::kBits == 3) {
    high[0] = ((device const uint*)(tile + m.high))[pair * 32 + lane];
  }
}

// Four bytes of the codebook, picked by the four nibbles of `codes`.
inline uint look_up(constant MatrixArgs& m, uint codes) {
  uint bytes = 0;
  for (uint i = 0; i < 4; ++i) bytes |= uint(uchar(m.codebook[codes >> 4 * i & 15])) << 8 * i;
  return bytes;
}

// The codes of block b of the pair, four in a word: k 4t.. of row g, of row g + 8, and k 16 + 4t.. of both.
template <class F>
inline void unpack_codes(thread const uint (&low)[8], thread const uint (&high)[2], int b, constant MatrixArgs& m,
                         thread uint (&a)[4]) {
  for (int r = 0; r < 4; ++r) {
    if (F::kBits == 8) {
      a[r] = low[4 * b + r];
    } else if (F::kCodebook) {
      a[r] = look_up(m, low[2 * b + r / 2] >> 16 * (r % 2));
    } else if (F::kBits == 6) {
      const uint last = (low[2 * b] & 0x03030303) | (low[2 * b + 1] & 0x03030303) << 2 | (high[b] & 0x03030303) << 4;
      a[r] = r == 3 ? last : (r == 2 ? high[b] : low[2 * b + r]) >> 2 & 0x3f3f3f3f;
    } else if (F::kBits >= 4) {
      a[r] = low[2 * b + r / 2] >> 4 * (r % 2) & 0x0f0f0f0f;
      if (F::kBits == 5) a[r] |= (high[0] >> (r + 4 * b) & 0x01010101) << 4;
    } else {
      a[r] = low[b] >> 2 * r & 0x03030303;
      if (F::kBits == 3) a[r] |= (high[0] >> (r + 4 * b) & 0x01010101) << 2;
    }
    if (F::kCentred) a[r] ^= uint(F::kZero) * 0x01010101;
  }
}

// The scales of one row and one block of a chunk: w = d (q - zero) + m, with factors of d and m for each 16 k where
// F::kHalved.
template <class F>
inline float load_d(device const uchar* chunk, int row, int block, float unit) {
  device const ushort* halves = (device const ushort*)chunk;
  if (F::kScales == kBF16D) return bf16_bits_to_float(halves[row * kChunkBlocks + block]);
  if (!F::kIsSuper) return half_bits_to_float(halves[row * kChunkBlocks + block]);
  const float d = half_bits_to_float(halves[F::kHasMin ? 2 * row : row]) * unit;
  if (F::kHalved) return d;
  const uchar scale = chunk[F::kHeaderBytes + row * kChunkBlocks + block];
  return d * float(F::kHasMin ? int(scale) : int(as_type<char>(scale)));
}

template <class F>
inline float load_m(device const uchar* chunk, int row, int block) {
  device const ushort* halves = (device const ushort*)chunk;
  if (!F::kHasMin) return 0.0f;
  if (!F::kIsSuper) return half_bits_to_float(halves[128 + row * kChunkBlocks + block]);
  const float m = half_bits_to_float(halves[2 * row + 1]);
  if (F::kHalved) return -m;
  return -(m * float(chunk[F::kHeaderBytes + 128 + row * kChunkBlocks + block]));
}

template <class F>
inline float load_half_scale(device const uchar* chunk, int row, int block, int half_block) {
  const uchar bits = chunk[F::kHeaderBytes + row * 16 + 2 * block + half_block];
  return float(F::kHasMin ? int(bits & 15) : int(as_type<char>(bits)));
}

template <class F>
inline float load_half_min(device const uchar* chunk, int row, int block, int half_block) {
  return float(chunk[F::kHeaderBytes + row * 16 + 2 * block + half_block] >> 4);
}

// The d and m of one row and half a block of a chunk, in one: w = d (q - zero) + m.
template <class F>
inline float2 load_factors(device const uchar* chunk, int row, int block, int half_block, float unit) {
  const float d = load_d<F>(chunk, row, block, unit), m = load_m<F>(chunk, row, block);
  if (!F::kHalved) return float2(d, m);
  return float2(d * load_half_scale<F>(chunk, row, block, half_block),
                F::kHasMin ? m * load_half_min<F>(chunk, row, block, half_block) : 0.0f);
}

template <class F>
inline float weight_of(uchar code, float2 factors) {
  const float w = factors.x * float(F::kSigned ? int(as_type<char>(code)) : int(code) - F::kZero);
  return F::kHasMin ? w + factors.y : w;
}

// One weight of a matrix.
template <class F>
inline float weight_at(device const uchar* data, constant MatrixArgs& m, int row, int k) {
  device const uchar* tile = data + long(row / kTileRows) * m.tile_bytes;
  row %= kTileRows;
  const int block = k / 32, i = k % 32, r = (row >= 8 ? 1 : 0) + (i >= 16 ? 2 : 0);
  uint low[8] = {}, high[2] = {}, a[4];
  load_codes<F>(tile, m, block / 2, row % 8 * 4 + i % 16 / 4, low, high);
  unpack_codes<F>(low, high, block % 2, m, a);
  device const uchar* chunk = tile + m.scales + block / kChunkBlocks * F::kChunkBytes;
  return weight_of<F>(uchar(a[r] >> 8 * (i % 4)), load_factors<F>(chunk, row, block % kChunkBlocks, i / 16, m.unit));
}

template <>
inline float weight_at<FloatF32>(device const uchar* data, constant MatrixArgs& m, int row, int k) {
  return ((device const float*)data)[long(row) * m.cols + k];
}
template <>
inline float weight_at<FloatF16>(device const uchar* data, constant MatrixArgs& m, int row, int k) {
  return float(((device const half*)data)[long(row) * m.cols + k]);
}
template <>
inline float weight_at<FloatBF16>(device const uchar* data, constant MatrixArgs& m, int row, int k) {
  return bf16_bits_to_float(((device const ushort*)data)[long(row) * m.cols + k]);
}
