#include "cuda/dequantize.h"

namespace rvllm::cuda {
namespace {

// One thread an element of a token's row; grid: [T, columns / 256].
template <class Weights>
__global__ void __launch_bounds__(256) embedding_kernel(float* out, int64_t out_stride, Weights table,
                                                        const int* __restrict__ ids, int cols, float scale) {
  const int k = blockIdx.y * blockDim.x + threadIdx.x;
  if (k >= cols) return;
  const float w = table.at(ids[blockIdx.x], k);
  out[blockIdx.x * out_stride + k] = scale == 1.0f ? w : w * scale;
}

}  // namespace

void embedding(Tensor out, const DeviceMatrix& table, const int* ids, float scale, cudaStream_t stream) {
  with_weights(table, [&](auto weights) {
    rv::launch(embedding_kernel<decltype(weights)>, dim3(unsigned(out.rows), unsigned((out.cols + 255) / 256)), 256, 0,
               stream, out.data, out.stride, weights, ids, int(out.cols), scale);
  });
}

}  // namespace rvllm::cuda
