// bfloat16 as the emulator has it: rounded to nearest even.
#pragma once

#include "cuda_runtime.h"

struct __align__(2) __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  __nv_bfloat16(float f) {
    const uint32_t u = rv_emu_bits<uint32_t>(f);
    const bool nan = (u & 0x7fffffff) > 0x7f800000;
    bits = nan ? 0x7fff : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
  }
  operator float() const { return rv_emu_bits<float>(uint32_t(bits) << 16); }
};
struct __align__(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 x) { return float(x); }
inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {float(v.x), float(v.y)}; }
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(uint16_t bits) { return rv_emu_bits<__nv_bfloat16>(bits); }
