#include "cpu/repack.h"

#include <algorithm>
#include <cstring>

namespace rvllm {
namespace {

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

void put16(uint8_t* p, int column, uint16_t value) { std::memcpy(p + 2 * column, &value, 2); }

void pack_scales(const PackedFormat& f, const Codes& codes, int block, int column, uint8_t* out) {
  uint8_t* low = out + column;
  uint8_t* high = out + kTileCols + column;
  switch (f.scales) {
    case Scales::kDM:
      put16(out + 32, column, codes.dmin);
      [[fallthrough]];
    case Scales::kD:
    case Scales::kBF16D:
      put16(out, column, codes.d);
      break;
    case Scales::kSuperD:
      *low = uint8_t(codes.scale[block]);
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

PackedType packed_type(const TypeInfo& type) {
  if (type.type == GgmlType::F32) return PackedType::F32;
  if (!type.decode) return type.type == GgmlType::F16 ? PackedType::F16 : PackedType::BF16;
  int i = int(PackedType::kFirstQuantized);
  const auto same = [&](const CodeFormat& f) {
    return f.bits == type.format.bits && f.zero == type.format.zero && f.scales == type.format.scales;
  };
  while (!same(kFormats[i])) ++i;
  return PackedType(i);
}

int64_t packed_tile_bytes(PackedType type, int64_t k) {
  if (type < PackedType::kFirstQuantized) return k * kTileCols * (type == PackedType::F32 ? 4 : 2);
  const PackedFormat f = kFormats[int(type)];
  return k / (32 * f.chunk_blocks()) * f.chunk_bytes();
}

void repack_tile(const TypeInfo& type, const uint8_t* rows, int64_t n, int64_t k, int64_t tile, uint8_t* out) {
  const PackedType packed = packed_type(type);
  const int64_t row_bytes = k / type.block_size * type.block_bytes;
  const int64_t first = tile * kTileCols;
  const int columns = int(std::min<int64_t>(kTileCols, n - first));
  rows += first * row_bytes;
  if (columns < kTileCols) std::memset(out, 0, size_t(packed_tile_bytes(packed, k)));

  if (!type.decode) {
    const int size = type.block_bytes;
    for (int c = 0; c < columns; ++c)
      for (int64_t i = 0; i < k; ++i)
        std::memcpy(out + (i * kTileCols + c) * size, rows + c * row_bytes + i * size, size_t(size));
    return;
  }
  const PackedFormat f = kFormats[int(packed)];
  Codes decoded[kTileCols] = {};
  uint8_t codes[kTileCols][32];
  for (int64_t block = 0; block < k / type.block_size; ++block) {
    for (int c = 0; c < columns; ++c) {
      type.decode(rows + c * row_bytes + block * type.block_bytes, decoded[c]);
      if (!f.is_super()) continue;
      put16(out, c, decoded[c].d);
      if (f.has_min()) put16(out + 32, c, decoded[c].dmin);
    }
    out += f.header_bytes();
    for (int b = 0; b < type.block_size / 32; ++b, out += f.block_bytes()) {
      for (int c = 0; c < kTileCols; ++c) std::memcpy(codes[c], decoded[c].q + 32 * b, 32);
      pack_codes(f.bits, codes, out);
      for (int c = 0; c < columns; ++c) pack_scales(f, decoded[c], b, c, out + f.code_bytes());
    }
  }
}

}  // namespace rvllm
