#include "quant.h"

#include <cstring>

namespace rvllm {

float f16_to_f32(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000u | mantissa << 13;
  } else if (exponent != 0) {
    bits = sign | (exponent + 112) << 23 | mantissa << 13;
  } else {
    const float tiny = float(mantissa) * 0x1p-24f;  // subnormal: exact in float32
    std::memcpy(&bits, &tiny, 4);
    bits |= sign;
  }
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

uint16_t f32_to_f16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;                  // NaN
  if (bits >= 0x47800000) return sign | 0x7c00;                 // 65536 and above
  if (bits < 0x38800000) {                                      // subnormal f16: let the FPU round at 2^-24
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    const float shifted = magnitude + 0.5f;                     // ulp(0.5) = 2^-24
    uint32_t rounded;
    std::memcpy(&rounded, &shifted, 4);
    return sign | uint16_t(rounded - 0x3f000000);
  }
  const uint32_t odd = bits >> 13 & 1;
  return sign | uint16_t((bits - 0x38000000 + 0xfff + odd) >> 13);
}

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

constexpr TypeInfo kTypes[] = {
    {GgmlType::F32, "F32", 1, 4, nullptr},
    {GgmlType::F16, "F16", 1, 2, nullptr},
    {GgmlType::BF16, "BF16", 1, 2, nullptr},
    {GgmlType::Q4_0, "Q4_0", kBlock, sizeof(BlockQ4_0), decode_q4_0},
    {GgmlType::Q4_1, "Q4_1", kBlock, sizeof(BlockQ4_1), decode_q4_1},
    {GgmlType::Q5_0, "Q5_0", kBlock, sizeof(BlockQ5_0), decode_q5_0},
    {GgmlType::Q5_1, "Q5_1", kBlock, sizeof(BlockQ5_1), decode_q5_1},
    {GgmlType::Q8_0, "Q8_0", kBlock, sizeof(BlockQ8_0), decode_q8_0},
    {GgmlType::Q2_K, "Q2_K", kSuper, sizeof(BlockQ2_K), decode_q2_k},
    {GgmlType::Q3_K, "Q3_K", kSuper, sizeof(BlockQ3_K), decode_q3_k},
    {GgmlType::Q4_K, "Q4_K", kSuper, sizeof(BlockQ4_K), decode_q4_k},
    {GgmlType::Q5_K, "Q5_K", kSuper, sizeof(BlockQ5_K), decode_q5_k},
    {GgmlType::Q6_K, "Q6_K", kSuper, sizeof(BlockQ6_K), decode_q6_k},
};

// w = (D * sub_scale) * (q - zero) + M for each weight of a decoded block.
void codes_to_floats(GgmlType type, const Codes& c, float* w) {
  const float d = f16_to_f32(c.d);
  switch (type) {
    case GgmlType::Q4_0:
    case GgmlType::Q5_0:
      for (int k = 0; k < kBlock; ++k) w[k] = d * float(c.q[k] - (type == GgmlType::Q4_0 ? 8 : 16));
      return;
    case GgmlType::Q8_0:
      for (int k = 0; k < kBlock; ++k) w[k] = d * float(int8_t(c.q[k]));
      return;
    case GgmlType::Q4_1:
    case GgmlType::Q5_1:
      for (int k = 0; k < kBlock; ++k) w[k] = d * float(c.q[k]) + f16_to_f32(c.dmin);
      return;
    case GgmlType::Q3_K:
    case GgmlType::Q6_K:
      for (int k = 0; k < kSuper; ++k)
        w[k] = d * float(c.scale[k / 16]) * float(c.q[k] - (type == GgmlType::Q3_K ? 4 : 32));
      return;
    default: {  // Q2_K, Q4_K, Q5_K
      const int span = type == GgmlType::Q2_K ? 16 : 32;
      const float dmin = f16_to_f32(c.dmin);
      for (int k = 0; k < kSuper; ++k)
        w[k] = d * float(c.scale[k / span]) * float(c.q[k]) - dmin * float(c.min[k / span]);
    }
  }
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
    codes_to_floats(type.type, codes, dst + k);
  }
}

}  // namespace rvllm
