#include "metal/kv_elements.h"

// A simdgroup writes 32 dimensions of one head of one token. grid: [T, KV heads, keys and values]; a group has the
// simdgroups of a head.
template <int kKind>
kernel void store_kv(constant StoreArgs& args [[buffer(0)]],
                     device uchar* cache [[buffer(1)]],
                     device const float* k [[buffer(2)]],    // [T, KVH * D]
                     device const float* v [[buffer(3)]],
                     device const int* slots [[buffer(4)]],  // [T]; negative: padding
                     uint3 group [[threadgroup_position_in_grid]],
                     uint lane [[thread_index_in_simdgroup]],
                     uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constant CacheArgs& c = args.cache;
  const int token = int(group.x), head = int(group.y), d = int(simdgroup * 32 + lane), slot = slots[token];
  const bool is_value = group.z == 1;
  if (slot < 0) return;
  const int block = slot / c.block_size, at = slot % c.block_size;
  device uchar* matrix = cache + block * c.block_bytes + (2 * head + (is_value ? 1 : 0)) * c.matrix_bytes;
  const int run = Cache<kKind>::kRun;
  const long element = is_value ? long(at) * c.padded_dim + d : (long(d / run) * c.block_size + at) * run + d % run;
  device const float* source = (is_value ? v + long(token) * args.v_stride : k + long(token) * args.k_stride);
  const float x = d < c.head_dim ? source[head * c.head_dim + d] : 0.0f;
  if (kKind == kCacheQ8) {
    const bool is_finite = simd_min(x - x == 0.0f ? 1 : 0) == 1;
    const float largest = as_type<float>(simd_max(as_type<int>(x) & 0x7fffffff));
    const float inverse = is_finite && largest > 1e-30f ? 127.0f / largest : 0.0f;  // never infinite
    if (lane == 0) {
      device float* scales = (device float*)(matrix + c.code_bytes);
      scales[is_value ? at * c.scales + int(simdgroup) : int(simdgroup) * c.block_size + at] =
          is_finite ? largest / 127.0f : not_a_number();
    }
    if (d < c.padded_dim) ((device char*)matrix)[element] = is_finite ? char(rint(x * inverse)) : char(0);
  } else if (d < c.padded_dim) {
    store_element<kKind>(matrix, element, x);
  }
}

typedef decltype(store_kv<kCacheF16>) store_kv_t;
template [[host_name("store_kv_f16")]] kernel store_kv_t store_kv<kCacheF16>;
template [[host_name("store_kv_f32")]] kernel store_kv_t store_kv<kCacheF32>;
template [[host_name("store_kv_bf16")]] kernel store_kv_t store_kv<kCacheBF16>;
template [[host_name("store_kv_q8_0")]] kernel store_kv_t store_kv<kCacheQ8>;
