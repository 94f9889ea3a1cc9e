#include "cpu/repack.h"

#include <algorithm>
#include <cstring>

namespace rvllm {
namespace {

constexpr int kFloatTypes = 3;  // F32, F16, BF16

int element_bytes(PackedType type) { return type == PackedType::F32 ? 4 : 2; }

// Codes of one block: [16 columns][32 k] to the bit planes described in packed.h.
void pack_codes(int bits, const uint8_t (*codes)[32], uint8_t* out) {
  alignas(4) uint8_t bytes[kTileCodes];  // [8 groups][16 columns][4 k]
  for (int c = 0; c < kTileCols; ++c)
    for (int g = 0; g < kGroups; ++g) std::memcpy(bytes + 64 * g + 4 * c, codes[c] + 4 * g, 4);
  if (bits == 8) {
    std::memcpy(out, bytes, kTileCodes);
  } else if (bits >= 4) {
    for (int i = 0; i < 256; ++i) out[i] = uint8_t((bytes[i] & 15) | (bytes[256 + i] & 15) << 4);
    out += 256;
    if (bits == 5)
      for (int i = 0; i < 64; ++i) {
        int plane = 0;
        for (int g = 0; g < kGroups; ++g) plane |= (bytes[64 * g + i] >> 4 & 1) << g;
        out[i] = uint8_t(plane);
      }
    if (bits == 6)
      for (int i = 0; i < 128; ++i) {
        int plane = 0;
        for (int j = 0; j < 4; ++j) plane |= (bytes[64 * (4 * (i / 64) + j) + i % 64] >> 4 & 3) << 2 * j;
        out[i] = uint8_t(plane);
      }
  } else {
    for (int i = 0; i < 128; ++i) {
      int plane = 0;
      for (int j = 0; j < 4; ++j) plane |= (bytes[64 * (4 * (i / 64) + j) + i % 64] & 3) << 2 * j;
      out[i] = uint8_t(plane);
    }
    out += 128;
    if (bits == 3)
      for (int i = 0; i < 64; ++i) {
        int plane = 0;
        for (int g = 0; g < kGroups; ++g) plane |= (bytes[64 * g + i] >> 2 & 1) << g;
        out[i] = uint8_t(plane);
      }
  }
}

uint8_t unpack_code(int bits, const uint8_t* p, int g, int lane) {
  const int quarter = 64 * (g / 4) + lane, shift = 2 * (g % 4);
  if (bits == 8) return p[64 * g + lane];
  if (bits <= 3) {
    const int low = p[quarter] >> shift & 3;
    return uint8_t(bits == 2 ? low : low | (p[128 + lane] >> g & 1) << 2);
  }
  const int low = g < 4 ? p[64 * g + lane] & 15 : p[64 * (g - 4) + lane] >> 4;
  if (bits == 4) return uint8_t(low);
  if (bits == 5) return uint8_t(low | (p[256 + lane] >> g & 1) << 4);
  return uint8_t(low | (p[256 + quarter] >> shift & 3) << 4);
}

void put16(uint8_t* p, int column, uint16_t value) { std::memcpy(p + 2 * column, &value, 2); }

float get16(const uint8_t* p, int column) {
  uint16_t half;
  std::memcpy(&half, p + 2 * column, 2);
  return f16_to_f32(half);
}

void pack_scales(const PackedFormat& f, const Codes& codes, int block, int column, uint8_t* out) {
  uint8_t* low = out + column;
  uint8_t* high = out + kTileCols + column;
  switch (f.scales) {
    case Scales::kDM:
      put16(out + 32, column, codes.dmin);
      [[fallthrough]];
    case Scales::kD:
      put16(out, column, codes.d);
      break;
    case Scales::kSuper:
      *low = uint8_t(codes.scale[block]);
      *high = codes.min[block];
      break;
    case Scales::kSuper16:
      *low = uint8_t(codes.scale[2 * block]);
      *high = uint8_t(codes.scale[2 * block + 1]);
      break;
    case Scales::kSuper16Min:
      *low = uint8_t(codes.scale[2 * block] | codes.min[2 * block] << 4);
      *high = uint8_t(codes.scale[2 * block + 1] | codes.min[2 * block + 1] << 4);
      break;
  }
}

}  // namespace

PackedType packed_type(GgmlType type) {
  switch (type) {
    case GgmlType::F32: return PackedType::F32;
    case GgmlType::F16: return PackedType::F16;
    case GgmlType::BF16: return PackedType::BF16;
    case GgmlType::Q4_0: return PackedType::Q4_0;
    case GgmlType::Q4_1: return PackedType::Q4_1;
    case GgmlType::Q5_0: return PackedType::Q5_0;
    case GgmlType::Q5_1: return PackedType::Q5_1;
    case GgmlType::Q8_0: return PackedType::Q8_0;
    case GgmlType::Q2_K: return PackedType::Q2_K;
    case GgmlType::Q3_K: return PackedType::Q3_K;
    case GgmlType::Q4_K: return PackedType::Q4_K;
    case GgmlType::Q5_K: return PackedType::Q5_K;
    case GgmlType::Q6_K: break;
  }
  return PackedType::Q6_K;
}

int64_t packed_tile_bytes(PackedType type, int64_t k) {
  if (int(type) < kFloatTypes) return k * kTileCols * element_bytes(type);
  const PackedFormat f = kFormats[int(type)];
  return k / (32 * f.chunk_blocks()) * f.chunk_bytes();
}

void repack_tile(const TypeInfo& type, const uint8_t* rows, int64_t n, int64_t k, int64_t tile, uint8_t* out) {
  const PackedType packed = packed_type(type.type);
  const int64_t row_bytes = k / type.block_size * type.block_bytes;
  const int64_t first = tile * kTileCols;
  const int columns = int(std::min<int64_t>(kTileCols, n - first));
  rows += first * row_bytes;
  if (columns < kTileCols) std::memset(out, 0, size_t(packed_tile_bytes(packed, k)));

  if (!type.decode) {
    const int size = type.block_bytes;
    for (int c = 0; c < columns; ++c)
      for (int64_t i = 0; i < k; ++i) std::memcpy(out + (i * kTileCols + c) * size, rows + c * row_bytes + i * size, size_t(size));
    return;
  }
  const PackedFormat f = kFormats[int(packed)];
  Codes decoded[kTileCols] = {};
  uint8_t codes[kTileCols][32];
  for (int64_t chunk = 0; chunk < k / type.block_size; ++chunk, out += f.chunk_bytes()) {
    for (int c = 0; c < columns; ++c) {
      type.decode(rows + c * row_bytes + chunk * type.block_bytes, decoded[c]);
      if (!f.is_super()) continue;
      put16(out, c, decoded[c].d);
      if (f.has_min()) put16(out + 32, c, decoded[c].dmin);
    }
    uint8_t* block_out = out + f.header_bytes();
    for (int b = 0; b < f.chunk_blocks(); ++b, block_out += f.block_bytes()) {
      for (int c = 0; c < kTileCols; ++c) std::memcpy(codes[c], decoded[c].q + 32 * b, 32);
      pack_codes(f.bits, codes, block_out);
      for (int c = 0; c < columns; ++c) pack_scales(f, decoded[c], b, c, block_out + f.code_bytes());
    }
  }
}

void unpack_row(PackedType type, const uint8_t* tile, int column, int64_t k, float* out) {
  if (int(type) < kFloatTypes) {
    for (int64_t i = 0; i < k; ++i) {
      const uint8_t* p = tile + (i * kTileCols + column) * element_bytes(type);
      uint16_t half;
      std::memcpy(&half, p, 2);
      if (type == PackedType::F32)
        std::memcpy(out + i, p, 4);
      else
        out[i] = type == PackedType::F16 ? f16_to_f32(half) : bf16_to_f32(half);
    }
    return;
  }
  const PackedFormat f = kFormats[int(type)];
  for (int64_t block = 0; block < k / 32; ++block, out += 32) {
    const uint8_t* chunk = tile + block / f.chunk_blocks() * f.chunk_bytes();
    const uint8_t* p = chunk + f.header_bytes() + block % f.chunk_blocks() * f.block_bytes();
    const uint8_t* s = p + f.code_bytes();
    const float d = get16(f.is_super() ? chunk : s, column);
    const float m = f.has_min() ? get16((f.is_super() ? chunk : s) + 32, column) : 0.0f;
    for (int i = 0; i < 32; ++i) {
      const uint8_t code = unpack_code(f.bits, p, i / 4, 4 * column + i % 4);
      const float q = float(f.bits == 8 ? int(int8_t(code)) : int(code) - f.zero);
      const uint8_t sub = s[f.is_halved() ? kTileCols * (i / 16) + column : column];
      switch (f.scales) {
        case Scales::kD: out[i] = d * q; break;
        case Scales::kDM: out[i] = d * q + m; break;
        case Scales::kSuper: out[i] = d * float(sub) * q - m * float(s[kTileCols + column]); break;
        case Scales::kSuper16: out[i] = d * float(int8_t(sub)) * q; break;
        case Scales::kSuper16Min: out[i] = d * float(sub & 15) * q - m * float(sub >> 4); break;
      }
    }
  }
}

}  // namespace rvllm
