// Half precision as the emulator has it: rounded to nearest even.
#pragma once

#include "cuda_runtime.h"

namespace rvllm::emu {

uint16_t half_bits(float f);
extern const float* const half_values;  // of each of the 65,536 bit patterns

}  // namespace rvllm::emu

struct __align__(2) __half {
  uint16_t bits;
  __half() = default;
  __half(float f) : bits(rvllm::emu::half_bits(f)) {}
  operator float() const { return rvllm::emu::half_values[bits]; }
};
using half = __half;
struct __align__(4) __half2 {
  __half x, y;
};
using half2 = __half2;

inline float __half2float(__half x) { return float(x); }
inline __half __float2half(float x) { return __half(x); }
inline __half __float2half_rn(float x) { return __half(x); }
inline float2 __half22float2(__half2 v) { return {float(v.x), float(v.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }
inline float __low2float(__half2 v) { return float(v.x); }
inline float __high2float(__half2 v) { return float(v.y); }
inline uint16_t __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(uint16_t bits) { return rv_emu_bits<__half>(bits); }
