// Reading and writing elements of the KV cache, as csrc/cpu/attention_kernels.inl has them.
#pragma once

#include "metal/device_math.h"

enum CacheKind : int { kCacheF16, kCacheF32, kCacheBF16, kCacheQ8 };  // KVType of kv_cache.h

constant int kScaleBlock = 32;  // elements of a head that share one scale

template <int kKind>
struct Cache {
  enum : int { kBytes = kKind == kCacheF32 ? 4 : kKind == kCacheQ8 ? 1 : 2, kRun = 16 / kBytes };
};

// Element i of a matrix of keys or values.
template <int kKind>
inline float load_element(device const uchar* matrix, long i) {
  if (kKind == kCacheF32) return ((device const float*)matrix)[i];
  if (kKind == kCacheF16) return float(((device const half*)matrix)[i]);
  if (kKind == kCacheBF16) return bf16_bits_to_float(((device const ushort*)matrix)[i]);
  return float(((device const char*)matrix)[i]);
}

// The elements in one word, the first `16 / kRun` of `out`.
template <int kKind>
inline float4 widen(uint word) {
  if (kKind == kCacheF32) return float4(as_type<float>(word), 0.0f, 0.0f, 0.0f);
  if (kKind == kCacheF16) {
    const half2 pair = as_type<half2>(word);
    return float4(float(pair.x), float(pair.y), 0.0f, 0.0f);
  }
  if (kKind == kCacheBF16) return float4(as_type<float>(word << 16), as_type<float>(word & 0xffff0000), 0.0f, 0.0f);
  const char4 codes = as_type<char4>(word);
  return float4(float(codes.x), float(codes.y), float(codes.z), float(codes.w));
}

// What is no finite number becomes NaN; f16 saturates.
template <int kKind>
inline void store_element(device uchar* matrix, long i, float x) {
  const bool is_finite = x - x == 0.0f;
  if (kKind == kCacheF32) {
    ((device float*)matrix)[i] = is_finite ? x : not_a_number();
  } else if (kKind == kCacheF16) {
    const half bounded = half(max(min(x, 65504.0f), -65504.0f));
    ((device ushort*)matrix)[i] = is_finite ? as_type<ushort>(bounded) : ushort(0x7e00);
  } else {
    ((device ushort*)matrix)[i] = float_to_bf16_bits(is_finite ? x : not_a_number());
  }
}
