// Reading and writing elements of the KV cache, as csrc/cpu/attention_kernels.inl has them.
#pragma once

#include "cuda/cuda_kv_cache.h"
#include "cuda/device_math.h"

namespace rvllm::cuda {

struct CacheF32 {
  using Element = float;
  static constexpr bool kScaled = false;
  static __device__ __forceinline__ float widen(float x) { return x; }
  static __device__ __forceinline__ float narrow(float x) { return x - x == 0.0f ? x : not_a_number(); }
};

struct CacheF16 {
  using Element = uint16_t;
  static constexpr bool kScaled = false;
  static __device__ __forceinline__ float widen(uint16_t x) { return half_bits_to_float(x); }
  static __device__ __forceinline__ uint16_t narrow(float x) {  // saturates; what is no finite number becomes NaN
    if (!(x - x == 0.0f)) return 0x7e00;
    return float_to_half_bits(fminf(fmaxf(x, -65504.0f), 65504.0f));
  }
};

struct CacheBF16 {
  using Element = uint16_t;
  static constexpr bool kScaled = false;
  static __device__ __forceinline__ float widen(uint16_t x) { return bf16_bits_to_float(x); }
  static __device__ __forceinline__ uint16_t narrow(float x) {
    return float_to_bf16_bits(x - x == 0.0f ? x : not_a_number());
  }
};

struct CacheQ8 {
  using Element = int8_t;
  static constexpr bool kScaled = true;
  static __device__ __forceinline__ float widen(int8_t x) { return float(x); }
};

// Calls f(Cache) with the element type's traits.
template <class F>
void with_kv_type(KVType type, const F& f) {
  switch (type) {
    case KVType::kF16: return f(CacheF16());
    case KVType::kF32: return f(CacheF32());
    case KVType::kBF16: return f(CacheBF16());
    case KVType::kQ8_0: return f(CacheQ8());
  }
}

}  // namespace rvllm::cuda
