// Float operations in the order of csrc/cpu/float_kernels.inl, as in cuda/device_math.h. Compiled without fast math and
// without contraction: a fused multiply-add is written out or not there.
#pragma once

#include <metal_stdlib>

#include "metal/kernel_args.h"

#if __METAL_VERSION__ >= 320
#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)
#else
#pragma clang fp contract(off)
#endif

using namespace metal;
using namespace rvllm;

constant int kOrderedLanes = 16;  // of a sum: element i belongs to lane i % 16

// exp within 1.2e-7 relative; exactly 0 from -87 down. NaN stays NaN.
inline float ordered_exp(float x) {
  const float raised = -87.0f > x ? -87.0f : x;
  const float clamped = 88.0f < raised ? 88.0f : raised;
  const float n = rint(clamped * 1.44269504088896341f);
  float r = fma(n, -0.693359375f, clamped);
  r = fma(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = fma(p, r, 1.3981999507e-3f);
  p = fma(p, r, 8.3334519073e-3f);
  p = fma(p, r, 4.1665795894e-2f);
  p = fma(p, r, 1.6666665459e-1f);
  p = fma(p, r, 5.0000001201e-1f);
  p = fma(p, r * r, r + 1.0f);
  const int exponent = n == n ? int(n) : 0;
  return -87.0f >= x ? 0.0f : p * as_type<float>((exponent + 127) << 23);
}

// cap * tanh(x / cap)
inline float soft_capped(float x, float cap) {
  return cap * (1.0f - 2.0f / (ordered_exp(x * (2.0f / cap)) + 1.0f));
}

// The sum of 16 lanes as a tree; every lane of the 16 gets it.
inline float tree_sum16(float x) {
  for (ushort span = 8; span > 0; span /= 2) x = x + simd_shuffle_xor(x, span);
  return x;
}

// An order of its own, which simd_sum does not promise.
inline float tree_sum32(float x) {
  for (ushort span = 16; span > 0; span /= 2) x = x + simd_shuffle_xor(x, span);
  return x;
}

inline float half_bits_to_float(ushort bits) { return float(as_type<half>(bits)); }
inline float bf16_bits_to_float(ushort bits) { return as_type<float>(uint(bits) << 16); }

inline ushort float_to_bf16_bits(float x) {
  const uint bits = as_type<uint>(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return ushort(bits >> 16 | 0x40);
  return ushort((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float not_a_number() { return as_type<float>(0x7fc00000); }
