#include <climits>

#include "cuda/device_math.h"
#include "cuda/kernels.h"

namespace rvllm::cuda {
namespace {

struct Best {
  float value;
  int index;
  int finite;  // whether all elements are

  __device__ __forceinline__ void take(float other_value, int other_index, int other_finite) {
    const bool wins = other_value > value || (other_value == value && other_index < index);
    value = wins ? other_value : value;
    index = wins ? other_index : index;
    finite &= other_finite;
  }
  __device__ __forceinline__ void take_lanes() {
    for (int span = 16; span > 0; span /= 2) {
      const float v = __shfl_xor_sync(kFullWarp, value, span);
      const int i = __shfl_xor_sync(kFullWarp, index, span), f = __shfl_xor_sync(kFullWarp, finite, span);
      take(v, i, f);
    }
  }
};

// A block finds the first of the largest elements of a row. grid: [rows].
__global__ void __launch_bounds__(1024) argmax_kernel(int* out, const float* __restrict__ x, int64_t stride, int cols) {
  RV_SHARED(float, values, 32);
  RV_SHARED(int, indices, 32);
  RV_SHARED(int, finites, 32);
  const float* const row = x + blockIdx.x * stride;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Best best{-INFINITY, INT_MAX, 1};
  for (int i = threadIdx.x; i < cols; i += blockDim.x) best.take(row[i], i, row[i] - row[i] == 0.0f);
  best.take_lanes();
  if (lane == 0) {
    values[warp] = best.value;
    indices[warp] = best.index;
    finites[warp] = best.finite;
  }
  __syncthreads();
  if (warp > 0) return;
  best = {values[lane], indices[lane], finites[lane]};
  best.take_lanes();
  if (lane == 0) out[blockIdx.x] = best.finite ? best.index : -1;
}

}  // namespace

void argmax(int* out, Tensor x, cudaStream_t stream) {
  rv::launch(argmax_kernel, unsigned(x.rows), 1024, 0, stream, out, x.data, x.stride, int(x.cols));
}

}  // namespace rvllm::cuda
