#include "quant.h"

#include <cstddef>
#include <cstring>

#include "half.h"
#include "quant_iq.h"

namespace rvllm {

namespace {

void nibbles(const uint8_t* qs, uint8_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = qs[i] & 15;
    q[i + 16] = qs[i] >> 4;
  }
}

void fifth_bits(const uint8_t* qh, uint8_t* q) {
  uint32_t bits;
  std::memcpy(&bits, qh, 4);
  for (int i = 0; i < 32; ++i) q[i] |= uint8_t((bits >> i & 1) << 4);
}

// The 6-bit scales and minima of Q4_K and Q5_K: 8 + 8 values in 12 bytes.
void scales_k4(const uint8_t* s, Codes& c) {
  for (int j = 0; j < 4; ++j) {
    c.scale[j] = int8_t(s[j] & 63);
    c.min[j] = s[j + 4] & 63;
    c.scale[j + 4] = int8_t((s[j + 8] & 15) | (s[j] >> 6) << 4);
    c.min[j + 4] = uint8_t(s[j + 8] >> 4 | (s[j + 4] >> 6) << 4);
  }
}

void decode_q4_0(const uint8_t* p, Codes& c) {
  const auto& b = *reinterpret_cast<const BlockQ4_0*>(p);
  c.d = b.d;
  nibbles(b.qs, c.q);
}

void decode_q4_1(const uint8_t* p, Codes& c) {
  const auto& b = *reinterpret_cast<const BlockQ4_1*>(p);
  c.d = b.d;
  c.dmin = b.m;
  nibbles(b.qs, c.q);
}

void decode_q5_0(const uint8_t* p, Codes& c) {
  const auto& b = *reinterpret_cast<const BlockQ5_0*>(p);
  c.d = b.d;
  nibbles(b.qs, c.q);
  fifth_bits(b.qh, c.q);
}

void decode_q5_1(const uint8_t* p, Codes& c) {
  const auto& b = *reinterpret_cast<const BlockQ5_1*>(p);
  c.d = b.d;
  c.dmin = b.m;
  nibbles(b.qs, c.q);
  fifth_bits(b.qh, c.q);
}

void decode_q8_0(const uint8_t* p, Codes& c) {
  const auto& b = *reinterpret_cast<const BlockQ8_0*>(p);
  c.d = b.d;
  std::memcpy(c.q, b.qs, 32);
}

// Two-bit codes of Q2_K and Q3_K: each half of 128 weights has 32 bytes, and bits 2j of byte i hold weight 32 j + i.
void two_bits(const uint8_t* qs, uint8_t* q) {
  for (int half = 0; half < 2; ++half)
    for (int j = 0; j < 4; ++j)
      for (int i = 0; i < 32; ++i) q[128 * half + 32 * j + i] = qs[32 * half + i] >> 2 * j & 3;
}

void decode_q2_k(const uint8_t* p, Codes& c) {
  const auto& b = *reinterpret_cast<const BlockQ2_K*>(p);
  c.d = b.d;
  c.dmin = b.dmin;
  two_bits(b.qs, c.q);
  for (int j = 0; j < 16; ++j) {
    c.scale[j] = int8_t(b.scales[j] & 15);
    c.min[j] = b.scales[j] >> 4;
  }
}

void decode_q3_k(const uint8_t* p, Codes& c) {
  const auto& b = *reinterpret_cast<const BlockQ3_K*>(p);
  c.d = b.d;
  two_bits(b.qs, c.q);
  for (int j = 0; j < 8; ++j)
    for (int i = 0; i < 32; ++i) c.q[32 * j + i] |= uint8_t((b.hmask[i] >> j & 1) << 2);
  for (int j = 0; j < 16; ++j) {
    const int low = j < 8 ? b.scales[j] & 15 : b.scales[j - 8] >> 4;
    const int high = b.scales[8 + j % 4] >> 2 * (j / 4) & 3;
    c.scale[j] = int8_t((low | high << 4) - 32);
  }
}

void decode_q4_k(const uint8_t* p, Codes& c) {
  const auto& b = *reinterpret_cast<const BlockQ4_K*>(p);
  c.d = b.d;
  c.dmin = b.dmin;
  scales_k4(b.scales, c);
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < 32; ++i) {
      c.q[64 * j + i] = b.qs[32 * j + i] & 15;
      c.q[64 * j + 32 + i] = b.qs[32 * j + i] >> 4;
    }
}

void decode_q5_k(const uint8_t* p, Codes& c) {
  const auto& b = *reinterpret_cast<const BlockQ5_K*>(p);
  c.d = b.d;
  c.dmin = b.dmin;
  scales_k4(b.scales, c);
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < 32; ++i) {
      c.q[64 * j + i] = uint8_t((b.qs[32 * j + i] & 15) | (b.qh[i] >> 2 * j & 1) << 4);
      c.q[64 * j + 32 + i] = uint8_t(b.qs[32 * j + i] >> 4 | (b.qh[i] >> (2 * j + 1) & 1) << 4);
    }
}

void decode_q6_k(const uint8_t* p, Codes& c) {
  const auto& b = *reinterpret_cast<const BlockQ6_K*>(p);
  c.d = b.d;
  std::memcpy(c.scale, b.scales, 16);
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < 32; ++i) {
      const uint8_t* ql = b.ql + 64 * half;
      const uint8_t qh = b.qh[32 * half + i];
      uint8_t* q = c.q + 128 * half + i;
      q[0] = uint8_t((ql[i] & 15) | (qh & 3) << 4);
      q[32] = uint8_t((ql[i + 32] & 15) | (qh >> 2 & 3) << 4);
      q[64] = uint8_t(ql[i] >> 4 | (qh >> 4 & 3) << 4);
      q[96] = uint8_t(ql[i + 32] >> 4 | (qh >> 6 & 3) << 4);
    }
}

void decode_tq1_0(const uint8_t* p, Codes& c) {
  const auto& b = *reinterpret_cast<const BlockTQ1_0*>(p);
  c.d = b.d;
  uint8_t* q = c.q;
  const auto digits = [&](const uint8_t* bytes, int count, int num_digits) {
    for (int n = 0, power = 1; n < num_digits; ++n, power *= 3)
      for (int i = 0; i < count; ++i) *q++ = uint8_t(uint8_t(bytes[i] * power) * 3 >> 8);
  };
  digits(b.qs, 32, 5);
  digits(b.qs + 32, 16, 5);
  digits(b.qh, 4, 4);
}

void decode_tq2_0(const uint8_t* p, Codes& c) {
  const auto& b = *reinterpret_cast<const BlockTQ2_0*>(p);
  c.d = b.d;
  two_bits(b.qs, c.q);
}

void decode_iq4_nl(const uint8_t* p, Codes& c) {
  const auto& b = *reinterpret_cast<const BlockIQ4_NL*>(p);
  c.d = b.d;
  nibbles(b.qs, c.q);
}

void decode_iq4_xs(const uint8_t* p, Codes& c) {
  const auto& b = *reinterpret_cast<const BlockIQ4_XS*>(p);
  c.d = b.d;
  for (int j = 0; j < 8; ++j) {
    c.scale[j] = int8_t(((b.scales_l[j / 2] >> 4 * (j % 2) & 15) | (b.scales_h >> 2 * j & 3) << 4) - 32);
    nibbles(b.qs + 16 * j, c.q + 32 * j);
  }
}

void decode_mxfp4(const uint8_t* p, Codes& c) {
  const auto& b = *reinterpret_cast<const BlockMXFP4*>(p);
  c.d = uint16_t(b.e < 2 ? 0x20 << b.e : (b.e - 1) << 7);  // the bits of 2^(e - 128) as bf16, which holds all of them
  nibbles(b.qs, c.q);
}

constexpr Codebook kCodebookIQ4{{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}, 1.0f};
constexpr Codebook kCodebookMXFP4{{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}, 1.0f};  // E2M1, in halves

constexpr CodeFormat kNone{};

constexpr TypeInfo kTypes[] = {
    {GgmlType::F32, "F32", 1, 4, kNone, nullptr, nullptr},
    {GgmlType::F16, "F16", 1, 2, kNone, nullptr, nullptr},
    {GgmlType::BF16, "BF16", 1, 2, kNone, nullptr, nullptr},
    {GgmlType::Q4_0, "Q4_0", kBlock, sizeof(BlockQ4_0), {4, 8, Scales::kD}, decode_q4_0, nullptr},
    {GgmlType::Q4_1, "Q4_1", kBlock, sizeof(BlockQ4_1), {4, 0, Scales::kDM}, decode_q4_1, nullptr},
    {GgmlType::Q5_0, "Q5_0", kBlock, sizeof(BlockQ5_0), {5, 16, Scales::kD}, decode_q5_0, nullptr},
    {GgmlType::Q5_1, "Q5_1", kBlock, sizeof(BlockQ5_1), {5, 0, Scales::kDM}, decode_q5_1, nullptr},
    {GgmlType::Q8_0, "Q8_0", kBlock, sizeof(BlockQ8_0), {8, 0, Scales::kD}, decode_q8_0, nullptr},
    {GgmlType::Q2_K, "Q2_K", kSuper, sizeof(BlockQ2_K), {2, 0, Scales::kSuper16Min}, decode_q2_k, nullptr},
    {GgmlType::Q3_K, "Q3_K", kSuper, sizeof(BlockQ3_K), {3, 4, Scales::kSuper16}, decode_q3_k, nullptr},
    {GgmlType::Q4_K, "Q4_K", kSuper, sizeof(BlockQ4_K), {4, 0, Scales::kSuper}, decode_q4_k, nullptr},
    {GgmlType::Q5_K, "Q5_K", kSuper, sizeof(BlockQ5_K), {5, 0, Scales::kSuper}, decode_q5_k, nullptr},
    {GgmlType::Q6_K, "Q6_K", kSuper, sizeof(BlockQ6_K), {6, 32, Scales::kSuper16}, decode_q6_k, nullptr},
    {GgmlType::TQ1_0, "TQ1_0", kSuper, sizeof(BlockTQ1_0), {2, 1, Scales::kD}, decode_tq1_0, nullptr},
    {GgmlType::TQ2_0, "TQ2_0", kSuper, sizeof(BlockTQ2_0), {2, 1, Scales::kD}, decode_tq2_0, nullptr},
    {GgmlType::IQ1_S, "IQ1_S", kSuper, sizeof(BlockIQ1_S), {3, kLookUp, Scales::kSuperD}, decode_iq1_s, &kCodebookIQ1},
    {GgmlType::IQ1_M, "IQ1_M", kSuper, sizeof(BlockIQ1_M), {3, kLookUp, Scales::kSuper16}, decode_iq1_m, &kCodebookIQ1},
    {GgmlType::IQ2_XXS, "IQ2_XXS", kSuper, sizeof(BlockIQ2_XXS), {3, kLookUp, Scales::kSuperD}, decode_iq2_xxs,
     &kCodebookIQ2},
    {GgmlType::IQ2_XS, "IQ2_XS", kSuper, sizeof(BlockIQ2_XS), {3, kLookUp, Scales::kSuper16}, decode_iq2_xs,
     &kCodebookIQ2},
    {GgmlType::IQ2_S, "IQ2_S", kSuper, sizeof(BlockIQ2_S), {3, kLookUp, Scales::kSuper16}, decode_iq2_s, &kCodebookIQ2},
    {GgmlType::IQ3_XXS, "IQ3_XXS", kSuper, sizeof(BlockIQ3_XXS), {4, kLookUp, Scales::kSuperD}, decode_iq3_xxs,
     &kCodebookIQ3_XXS},
    {GgmlType::IQ3_S, "IQ3_S", kSuper, sizeof(BlockIQ3_S), {4, kLookUp, Scales::kSuperD}, decode_iq3_s,
     &kCodebookIQ3_S},
    {GgmlType::IQ4_NL, "IQ4_NL", kBlock, sizeof(BlockIQ4_NL), {4, kLookUp, Scales::kD}, decode_iq4_nl, &kCodebookIQ4},
    {GgmlType::IQ4_XS, "IQ4_XS", kSuper, sizeof(BlockIQ4_XS), {4, kLookUp, Scales::kSuperD}, decode_iq4_xs,
     &kCodebookIQ4},
    {GgmlType::MXFP4, "MXFP4", kBlock, sizeof(BlockMXFP4), {4, kLookUp, Scales::kBF16D}, decode_mxfp4, &kCodebookMXFP4},
};

// The weights of a decoded block.
void codes_to_floats(const TypeInfo& type, const Codes& c, float* w) {
  const CodeFormat f = type.format;
  const float unit = type.codebook ? type.codebook->unit : 1.0f;
  const float d = (f.scales == Scales::kBF16D ? bf16_to_f32(c.d) : f16_to_f32(c.d)) * unit;
  const float m = f.has_min() ? f16_to_f32(c.dmin) : 0.0f;
  const int span = f.is_halved() ? 16 : 32;
  for (int k = 0; k < type.block_size; ++k) {
    const int q = type.codebook ? type.codebook->values[c.q[k]] : f.bits == 8 ? int8_t(c.q[k]) : c.q[k] - f.zero;
    w[k] = f.is_super() ? d * float(c.scale[k / span]) * float(q) : d * float(q);
    if (f.has_min()) w[k] += f.is_super() ? -(m * float(c.min[k / span])) : m;
  }
}

// Where the f16 scale lies in a block; a minimum follows it.
int64_t scale_offset(GgmlType type) {
  switch (type) {
    case GgmlType::Q2_K: return offsetof(BlockQ2_K, d);
    case GgmlType::Q3_K: return offsetof(BlockQ3_K, d);
    case GgmlType::Q6_K: return offsetof(BlockQ6_K, d);
    case GgmlType::TQ1_0: return offsetof(BlockTQ1_0, d);
    case GgmlType::TQ2_0: return offsetof(BlockTQ2_0, d);
    default: return 0;
  }
}

// Whether none of `count` words, `stride` bytes apart, has every bit of `exponent` set, as infinity and NaN have.
template <class Word>
bool none_full(const uint8_t* p, int64_t count, int64_t stride, Word exponent) {
  bool found = false;
  for (int64_t i = 0; i < count; ++i) {
    Word word;
    std::memcpy(&word, p + i * stride, sizeof word);
    found |= (word & exponent) == exponent;
  }
  return !found;
}

}  // namespace

const TypeInfo* find_type(uint32_t type) {
  for (const TypeInfo& info : kTypes)
    if (uint32_t(info.type) == type) return &info;
  return nullptr;
}

void dequantize_row(const TypeInfo& type, const uint8_t* src, float* dst, int64_t n) {
  if (type.type == GgmlType::F32) {
    std::memcpy(dst, src, size_t(n) * 4);
    return;
  }
  if (!type.decode) {
    for (int64_t k = 0; k < n; ++k) {
      uint16_t h;
      std::memcpy(&h, src + 2 * k, 2);
      dst[k] = type.type == GgmlType::F16 ? f16_to_f32(h) : bf16_to_f32(h);
    }
    return;
  }
  Codes codes;
  for (int64_t k = 0; k < n; k += type.block_size, src += type.block_bytes) {
    type.decode(src, codes);
    codes_to_floats(type, codes, dst + k);
  }
}

bool all_finite(const TypeInfo& type, const uint8_t* src, int64_t n) {
  const int64_t blocks = n / type.block_size, size = type.block_bytes;
  const uint8_t* scale = src + scale_offset(type.type);
  switch (type.type) {
    case GgmlType::F32: return none_full<uint32_t>(src, n, 4, 0x7f800000);
    case GgmlType::BF16: return none_full<uint16_t>(src, n, 2, 0x7f80);
    case GgmlType::MXFP4: return none_full<uint8_t>(src, blocks, size, 0xfc);  // from 2^124 on; times 12 is too much
    case GgmlType::IQ1_M: {
      Codes codes;
      bool finite = true;
      for (int64_t i = 0; i < blocks; ++i) {
        type.decode(src + i * size, codes);
        finite &= (codes.d & 0x7c00) != 0x7c00;
      }
      return finite;
    }
    default:
      return none_full<uint16_t>(scale, blocks, size, 0x7c00) &&
             (!type.format.has_min() || none_full<uint16_t>(scale + 2, blocks, size, 0x7c00));
  }
}

}  // namespace rvllm
