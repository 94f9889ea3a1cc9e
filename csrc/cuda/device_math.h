// Float operations in the order of csrc/cpu/float_kernels.inl, so that both devices give the same bits. The .cu files
// are compiled without contraction: a fused multiply-add is written out or not there.
#pragma once

#include "cuda/gpu.h"

namespace rvllm::cuda {

constexpr int kOrderedLanes = 16;  // of a sum: element i belongs to lane i % 16

__device__ __forceinline__ float to_f(float x) { return x; }
__device__ __forceinline__ float to_f(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_f(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
struct From;  // From<T>::f(x): a float rounded to nearest even
template <>
struct From<float> {
  static __device__ __forceinline__ float f(float x) { return x; }
};
template <>
struct From<__half> {
  static __device__ __forceinline__ __half f(float x) { return __float2half_rn(x); }
};
template <>
struct From<__nv_bfloat16> {
  static __device__ __forceinline__ __nv_bfloat16 f(float x) { return __float2bfloat16_rn(x); }
};

// exp within 1.2e-7 relative; exactly 0 from -87 down. NaN stays NaN.
__device__ __forceinline__ float ordered_exp(float x) {
  const float raised = -87.0f > x ? -87.0f : x;
  const float clamped = 88.0f < raised ? 88.0f : raised;
  const float n = rintf(clamped * 1.44269504088896341f);
  float r = fmaf(n, -0.693359375f, clamped);
  r = fmaf(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = fmaf(p, r, 1.3981999507e-3f);
  p = fmaf(p, r, 8.3334519073e-3f);
  p = fmaf(p, r, 4.1665795894e-2f);
  p = fmaf(p, r, 1.6666665459e-1f);
  p = fmaf(p, r, 5.0000001201e-1f);
  p = fmaf(p, r * r, r + 1.0f);
  const int exponent = n == n ? int(n) : 0;
  return -87.0f >= x ? 0.0f : p * __int_as_float((exponent + 127) << 23);
}

// cap * tanh(x / cap)
__device__ __forceinline__ float soft_capped(float x, float cap) {
  return cap * (1.0f - 2.0f / (ordered_exp(x * (2.0f / cap)) + 1.0f));
}

// The sum of 16 lanes as a tree; every lane of the 16 gets it.
__device__ __forceinline__ float tree_sum16(float x) {
  for (int span = 8; span > 0; span /= 2) x = x + __shfl_xor_sync(kFullWarp, x, span);
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
  for (int span = 16; span > 0; span /= 2) x += __shfl_xor_sync(kFullWarp, x, span);
  return x;
}

__device__ __forceinline__ int warp_max(int x) {
  for (int span = 16; span > 0; span /= 2) {
    const int other = __shfl_xor_sync(kFullWarp, x, span);
    x = x > other ? x : other;
  }
  return x;
}

__device__ __forceinline__ float half_bits_to_float(uint32_t bits) {
  const uint16_t low = uint16_t(bits);
  __half h;
  memcpy(&h, &low, 2);
  return to_f(h);
}

__device__ __forceinline__ float bf16_bits_to_float(uint32_t bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ uint16_t float_to_half_bits(float x) {
  const __half h = __float2half_rn(x);
  uint16_t bits;
  memcpy(&bits, &h, 2);
  return bits;
}

__device__ __forceinline__ uint16_t float_to_bf16_bits(float x) {
  const uint32_t bits = __float_as_uint(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fc00000); }

}  // namespace rvllm::cuda
