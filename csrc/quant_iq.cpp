#include "quant_iq.h"

namespace rvllm {
namespace {

#include "iq_grids.inl"

// A grid point of 8 places of 2 bits, with a sign bit each.
void put8(uint16_t point, int signs, uint8_t* q) {
  for (int i = 0; i < 8; ++i) q[i] = uint8_t((point >> 2 * i & 3) | (signs >> i & 1) << 2);
}

// A grid point of 4 places of 3 bits in nibbles, with a sign bit each.
void put4(uint16_t point, int signs, uint8_t* q) {
  for (int i = 0; i < 4; ++i) q[i] = uint8_t((point >> 4 * i & 7) | (signs >> i & 1) << 3);
}

// Seven signs are stored of eight: an even number of them is set.
int all_signs(uint32_t seven) {
  seven &= 127;
  return int(seven) | __builtin_parity(seven) << 7;
}

int8_t odd(int scale) { return int8_t(2 * scale + 1); }

void nibble_scales(const uint8_t* scales, int count, Codes& c) {
  for (int j = 0; j < count; ++j) c.scale[j] = odd(scales[j / 2] >> 4 * (j % 2) & 15);
}

}  // namespace

void decode_iq1_s(const uint8_t* p, Codes& c) {
  const auto& b = *reinterpret_cast<const BlockIQ1_S*>(p);
  c.d = b.d;
  for (int i = 0; i < 32; ++i) {
    const int h = b.qh[i / 4];
    c.scale[i / 4] = odd(h >> 12 & 7);
    put8(kGridIQ1[b.qs[i] | (h >> 3 * (i % 4) & 7) << 8], h >> 15 ? 0xff : 0, c.q + 8 * i);
  }
}

void decode_iq1_m(const uint8_t* p, Codes& c) {
  const auto& b = *reinterpret_cast<const BlockIQ1_M*>(p);
  c.d = 0;
  for (int j = 0; j < 4; ++j) c.d = uint16_t(c.d | b.scales[j] >> 12 << 4 * j);
  for (int j = 0; j < 16; ++j) c.scale[j] = odd(b.scales[j / 4] >> 3 * (j % 4) & 7);
  for (int i = 0; i < 32; ++i) {
    const int h = b.qh[i / 2] >> 4 * (i % 2);
    put8(kGridIQ1[b.qs[i] | (h & 7) << 8], h & 8 ? 0xff : 0, c.q + 8 * i);
  }
}

void decode_iq2_xxs(const uint8_t* p, Codes& c) {
  const auto& b = *reinterpret_cast<const BlockIQ2_XXS*>(p);
  c.d = b.d;
  for (int j = 0; j < 8; ++j) {
    const uint32_t signs = b.blocks[j].signs;
    c.scale[j] = odd(int(signs >> 28));
    for (int i = 0; i < 4; ++i)
      put8(kGridIQ2_XXS[b.blocks[j].qs[i]], all_signs(signs >> 7 * i), c.q + 32 * j + 8 * i);
  }
}

void decode_iq2_xs(const uint8_t* p, Codes& c) {
  const auto& b = *reinterpret_cast<const BlockIQ2_XS*>(p);
  c.d = b.d;
  nibble_scales(b.scales, 16, c);
  for (int i = 0; i < 32; ++i) put8(kGridIQ2_XS[b.qs[i] & 511], all_signs(b.qs[i] >> 9), c.q + 8 * i);
}

void decode_iq2_s(const uint8_t* p, Codes& c) {
  const auto& b = *reinterpret_cast<const BlockIQ2_S*>(p);
  c.d = b.d;
  nibble_scales(b.scales, 16, c);
  for (int i = 0; i < 32; ++i)
    put8(kGridIQ2_S[b.qs[i] | (b.qh[i / 4] >> 2 * (i % 4) & 3) << 8], b.signs[i], c.q + 8 * i);
}

void decode_iq3_xxs(const uint8_t* p, Codes& c) {
  const auto& b = *reinterpret_cast<const BlockIQ3_XXS*>(p);
  c.d = b.d;
  for (int j = 0; j < 8; ++j) {
    c.scale[j] = odd(int(b.signs[j] >> 28));
    for (int i = 0; i < 8; ++i)
      put4(kGridIQ3_XXS[b.qs[8 * j + i]], all_signs(b.signs[j] >> 7 * (i / 2)) >> 4 * (i % 2), c.q + 32 * j + 4 * i);
  }
}

void decode_iq3_s(const uint8_t* p, Codes& c) {
  const auto& b = *reinterpret_cast<const BlockIQ3_S*>(p);
  c.d = b.d;
  nibble_scales(b.scales, 8, c);
  for (int i = 0; i < 64; ++i)
    put4(kGridIQ3_S[b.qs[i] | (b.qh[i / 8] >> i % 8 & 1) << 8], b.signs[i / 2] >> 4 * (i % 2), c.q + 4 * i);
}

}  // namespace rvllm
