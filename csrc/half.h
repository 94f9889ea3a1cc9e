// Scalar conversions of 16-bit floats. Static, with no STL: the ISA files include it, and must not share inline code.
#pragma once

#include <stdint.h>

namespace rvllm {

static inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  uint32_t bits = sign | (exponent + 112) << 23 | mantissa << 13;
  if (exponent == 31) bits = sign | 0x7f800000u | mantissa << 13;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  if (exponent == 0) f = (sign ? -1.0f : 1.0f) * (float(mantissa) * 0x1p-24f);  // subnormal: exact in float32
  return f;
}

// To nearest even; overflow gives infinity.
static inline uint16_t f32_to_f16(float f) {
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return uint16_t(sign | 0x7e00 | (bits >> 13 & 0x3ff));
  if (bits >= 0x47800000) return sign | 0x7c00;
  if (bits < 0x38800000) {  // subnormal f16: adding 0.5, whose ulp is 2^-24, rounds
    float magnitude;
    __builtin_memcpy(&magnitude, &bits, 4);
    const float shifted = magnitude + 0.5f;
    uint32_t rounded;
    __builtin_memcpy(&rounded, &shifted, 4);
    return sign | uint16_t(rounded - 0x3f000000);
  }
  return sign | uint16_t((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

static inline float bf16_to_f32(uint16_t h) {
  const uint32_t bits = uint32_t(h) << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}

}  // namespace rvllm
