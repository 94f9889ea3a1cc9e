#include "cuda/kernels.h"
#include "cuda/kv_elements.h"

namespace rvllm::cuda {
namespace {

struct StoreArgs {
  KVLayout cache;  // of the layer
  const float* k;  // [T, KVH * D]
  const float* v;
  int64_t k_stride, v_stride;
  const int* slots;  // [T]; negative: padding
};

// A warp writes 32 dimensions of one head of one token. grid: [T, KV heads, keys and values]; block: [32, D / 32].
template <class Cache>
__global__ void store_kv_kernel(StoreArgs a) {
  const KVLayout& c = a.cache;
  const int token = blockIdx.x, head = blockIdx.y, lane = threadIdx.x, d = threadIdx.y * 32 + lane;
  const bool is_value = blockIdx.z == 1;
  const int slot = a.slots[token];
  if (slot < 0) return;
  const int block = slot / c.block_size, at = slot % c.block_size;
  uint8_t* const matrix = c.data + int64_t(block) * c.block_bytes + (2 * head + is_value) * c.matrix_bytes;
  constexpr int kRun = 16 / sizeof(typename Cache::Element);
  const int64_t index = is_value ? int64_t(at) * c.padded_dim + d
                                 : (int64_t(d / kRun) * c.block_size + at) * kRun + d % kRun;
  auto* const element = reinterpret_cast<typename Cache::Element*>(matrix) + index;
  const float* const source = is_value ? a.v + token * a.v_stride : a.k + token * a.k_stride;
  const float x = d < c.head_dim ? source[head * c.head_dim + d] : 0.0f;
  if constexpr (Cache::kScaled) {
    const bool finite = __all_sync(kFullWarp, x - x == 0.0f) != 0;
    const float largest = __int_as_float(warp_max(__float_as_int(x) & 0x7fffffff));
    const float inverse = finite && largest > 1e-30f ? 127.0f / largest : 0.0f;  // never infinite
    if (lane == 0) {
      float* const scales = reinterpret_cast<float*>(matrix + c.code_bytes);
      scales[is_value ? at * c.scales + threadIdx.y : threadIdx.y * c.block_size + at] =
          finite ? largest / 127.0f : not_a_number();
    }
    if (d < c.padded_dim) *element = finite ? int8_t(rintf(x * inverse)) : int8_t(0);
  } else {
    if (d < c.padded_dim) *element = Cache::narrow(x);
  }
}

}  // namespace

void store_kv(const KVLayout& cache, Tensor k, Tensor v, const int* slots, cudaStream_t stream) {
  with_kv_type(cache.type, [&](auto type) {
    rv::launch(store_kv_kernel<decltype(type)>, dim3(unsigned(k.rows), unsigned(cache.num_kv_heads), 2),
           dim3(32, unsigned((cache.head_dim + 31) / 32)), 0, stream,
           StoreArgs{cache, k.data, v.data, k.stride, v.stride, slots});
  });
}

}  // namespace rvllm::cuda
