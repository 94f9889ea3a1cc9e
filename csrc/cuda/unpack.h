// Reads the layout of packed_weights.h on the device.
#pragma once

#include "cuda/device_math.h"
#include "cuda/packed_weights.h"

namespace rvllm::cuda {

// Four bytes of a table of 16, picked by the four nibbles of `codes`.
__device__ __forceinline__ uint32_t look_up(const uint4& table, uint32_t codes) {
  const uint32_t low = __byte_perm(table.x, table.y, codes & 0x7777);
  const uint32_t high = __byte_perm(table.z, table.w, codes & 0x7777);
  return __byte_perm(low, high, 0x3210 | (codes & 0x8888) >> 1);
}

// Unpacked codes lie this many bits up in their byte, in rows g or g + 8 of a tile: those with their zero in the middle
// at its top, so that their sign is the byte's; of two nibbles each stays in its place.
template <class F, bool kHighRow>
constexpr int kCodeShift = F::kCentred ? 8 - F::kBits : kHighRow && F::kBits == 4 && !F::kCodebook ? 4 : 0;

// To multiply by: sums of unpacked codes of a row become sums of codes.
template <class F>
__device__ __forceinline__ float code_unit(bool is_high_row) {
  return 1.0f / float(1 << (is_high_row ? kCodeShift<F, true> : kCodeShift<F, false>));
}

__device__ __forceinline__ uint32_t shifted(uint32_t word, int by) { return by >= 0 ? word << by : word >> -by; }

// What one lane reads of a pair of blocks.
template <class F>
struct CodePair {
  uint32_t low[F::kLowWords] = {};
  uint32_t high[F::kHighWords > 0 ? F::kHighWords : 1] = {};

  __device__ __forceinline__ void load(const uint8_t* tile, const TileLayout& layout, int pair, int lane) {
    load(tile + int64_t(pair) * 128 * F::kLowWords, tile + layout.high + int64_t(pair) * 128 * F::kHighWords, lane,
         [](const auto* p) { return __ldg(p); });
  }
  // Of a copy of a pair's planes in shared memory: from where the lane's words begin.
  static constexpr int kLowBytes = F::kLowWords < 4 ? 4 * F::kLowWords : 16, kHighBytes = 4 * F::kHighWords;
  __device__ __forceinline__ void load_shared(const uint8_t* low_words, const uint8_t* high_words) {
    load(low_words, high_words, 0, [](const auto* p) { return *p; });
  }

  // The registers of block b of the pair, for mma_k32: codes less zero, kCodeShift bits up; signed where F::kSigned.
  template <int b>
  __device__ __forceinline__ void unpack(const uint4& table, uint32_t (&a)[4]) const {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int at = r % 2 ? kCodeShift<F, true> : kCodeShift<F, false>;
      if constexpr (F::kBits == 8) {
        a[r] = low[4 * b + r];
      } else if constexpr (F::kCodebook) {
        a[r] = look_up(table, low[2 * b + r / 2] >> 16 * (r % 2));
      } else if constexpr (F::kBits == 6) {
        const uint32_t last =
            (low[2 * b] << 2 & 0x0c0c0c0c) | (low[2 * b + 1] << 4 & 0x30303030) | (high[b] << 6 & 0xc0c0c0c0);
        a[r] = r == 3 ? last : (r == 2 ? high[b] : low[2 * b + r]) & 0xfcfcfcfc;
      } else if constexpr (F::kBits >= 4) {
        a[r] = shifted(low[2 * b + r / 2], at - 4 * (r % 2)) & 0x0f0f0f0fu << at;
        if constexpr (F::kBits == 5) a[r] |= shifted(high[0], at + 4 - (r + 4 * b)) & 0x10101010u << at;
      } else {
        a[r] = shifted(low[b], at - 2 * r) & 0x03030303u << at;
        if constexpr (F::kBits == 3) a[r] |= shifted(high[0], at + 2 - (r + 4 * b)) & 0x04040404u << at;
      }
      // The highest bits keep the bytes apart.
      if constexpr (F::kZero != 0 && !F::kCentred) a[r] = ((a[r] | 0x80808080) - F::kZero * 0x01010101u) ^ 0x80808080;
    }
  }

 private:
  template <class Read>
  __device__ __forceinline__ void load(const void* low_plane, const void* high_plane, int lane, const Read& read) {
    if constexpr (F::kLowWords >= 4) {
#pragma unroll
      for (int i = 0; i < F::kLowWords / 4; ++i) {
        const uint4 words = read(static_cast<const uint4*>(low_plane) + 32 * i + lane);
        low[4 * i] = words.x, low[4 * i + 1] = words.y, low[4 * i + 2] = words.z, low[4 * i + 3] = words.w;
      }
    } else {
      const uint2 words = read(static_cast<const uint2*>(low_plane) + lane);
      low[0] = words.x, low[1] = words.y;
    }
    if constexpr (F::kHighWords == 2) {
      const uint2 words = read(static_cast<const uint2*>(high_plane) + lane);
      high[0] = words.x, high[1] = words.y;
    } else if constexpr (F::kHighWords == 1) {
      high[0] = read(static_cast<const uint32_t*>(high_plane) + lane);
    }
  }
};

// The scales of one block of a row: w = d (q - zero) + m, or d scale(half) (q - zero) + m min(half) of half the block.
template <class F>
struct Scale {
  uint32_t header = 0;          // d, m of the super-block
  uint32_t scale = 0, min = 0;  // of the block, as they lie in the chunk

  __device__ __forceinline__ float d(float unit) const {  // unit: of the codebook
    if constexpr (F::kScales == Scales::kBF16D) return bf16_bits_to_float(scale);
    if constexpr (!F::kSuper) return half_bits_to_float(scale);
    const float d = half_bits_to_float(header & 0xffff) * unit;
    if constexpr (F::kHalved) return d;
    return d * float(F::kHasMin ? int(scale) : int(int8_t(scale)));
  }
  __device__ __forceinline__ float m() const {
    if constexpr (!F::kHasMin) return 0.0f;
    if constexpr (!F::kSuper) return half_bits_to_float(min);
    const float m = half_bits_to_float(header >> 16);
    if constexpr (F::kHalved) return -m;
    return -(m * float(min));
  }
  // Of 16 weights, where F::kHalved.
  __device__ __forceinline__ int scale_of(int half) const {
    const uint32_t bits = scale >> 8 * half & 255;
    return F::kHasMin ? int(bits & 15) : int(int8_t(bits));
  }
  __device__ __forceinline__ int min_of(int half) const { return int(scale >> 8 * half & 255) >> 4; }

  // chunk: in global memory, or a copy of it in shared memory.
  __device__ __forceinline__ void load(const uint8_t* chunk, int row, int block) {
    if constexpr (F::kSuper)
      header = F::kHasMin ? reinterpret_cast<const uint32_t*>(chunk)[row]
                          : reinterpret_cast<const uint16_t*>(chunk)[row];
    chunk += F::kHeaderBytes;
    const int at = row * kChunkBlocks + block;
    if constexpr (F::kSuper && !F::kHalved) {
      scale = chunk[at];
      if constexpr (F::kHasMin) min = chunk[128 + at];
    } else {
      scale = reinterpret_cast<const uint16_t*>(chunk)[at];
      if constexpr (F::kHasMin && !F::kHalved) min = reinterpret_cast<const uint16_t*>(chunk + 256)[at];
    }
  }
};

// Those of kBlocks blocks of one row, of one chunk.
template <class F, int kBlocks>
struct RowScales {
  static constexpr int kBytes = F::kSuper && !F::kHalved ? 1 : 2;  // of a block
  static constexpr int kWords = kBlocks * kBytes / 4;
  static constexpr bool kHasMins = F::kHasMin && !F::kHalved;
  Scale<F> super;
  uint32_t scales[kWords];
  uint32_t mins[kHasMins ? kWords : 1];

  __device__ __forceinline__ void load(const uint8_t* chunk, int row, int first_block) {
    if constexpr (F::kSuper)
      super.header = F::kHasMin ? __ldg(reinterpret_cast<const uint32_t*>(chunk) + row)
                                : __ldg(reinterpret_cast<const uint16_t*>(chunk) + row);
    chunk += F::kHeaderBytes + (row * kChunkBlocks + first_block) * kBytes;
    load_words(chunk, scales);
    if constexpr (kHasMins) load_words(chunk + kTileRows * kChunkBlocks * kBytes, mins);
  }
  // block: known when this is compiled, as places in registers must be.
  __device__ __forceinline__ Scale<F> at(int block) const {
    Scale<F> s = super;
    s.scale = part(scales, block);
    if constexpr (kHasMins) s.min = part(mins, block);
    return s;
  }

 private:
  static __device__ __forceinline__ void load_words(const uint8_t* from, uint32_t (&words)[kWords]) {
    if constexpr (kWords == 4) {
      const uint4 w = __ldg(reinterpret_cast<const uint4*>(from));
      words[0] = w.x, words[1] = w.y, words[2] = w.z, words[3] = w.w;
    } else if constexpr (kWords == 2) {
      const uint2 w = __ldg(reinterpret_cast<const uint2*>(from));
      words[0] = w.x, words[1] = w.y;
    } else {
      words[0] = __ldg(reinterpret_cast<const uint32_t*>(from));
    }
  }
  static __device__ __forceinline__ uint32_t part(const uint32_t (&words)[kWords], int block) {
    const int at = block * kBytes;
    return words[at / 4] >> 8 * (at % 4) & (kBytes == 1 ? 255 : 0xffff);
  }
};

// The weight of byte `at` of register r as unpacked.
template <class F>
__device__ __forceinline__ float weight_of(const Scale<F>& scale, float unit, uint32_t bytes, int r, int at) {
  const int half = r / 2, byte = int(bytes >> 8 * at & 255);
  const float d = scale.d(unit), q = float(F::kSigned ? int(int8_t(byte)) : byte) * code_unit<F>(r % 2);
  float w = F::kHalved ? d * float(scale.scale_of(half)) * q : d * q;
  if (F::kHasMin) w += F::kHalved ? scale.m() * float(scale.min_of(half)) : scale.m();
  return w;
}

// Weight k of a row of a tile.
template <class F>
__device__ float weight_at(const uint8_t* tile, const TileLayout& layout, const uint4& table, float unit, int row,
                           int k) {
  const int block = k / 32, i = k % 32, r = (row >= 8) + 2 * (i >= 16);
  CodePair<F> codes;
  codes.load(tile, layout, block / 2, row % 8 * 4 + i % 16 / 4);
  uint32_t a[4];
  if (block % 2 == 0)
    codes.template unpack<0>(table, a);
  else
    codes.template unpack<1>(table, a);
  Scale<F> scale;
  scale.load(tile + layout.scales + int64_t(block / kChunkBlocks) * F::kChunkBytes, row, block % kChunkBlocks);
  return weight_of(scale, unit, r == 0 ? a[0] : r == 1 ? a[1] : r == 2 ? a[2] : a[3], r, i % 4);
}

}  // namespace rvllm::cuda
