#include "cuda/device_math.h"
#include "cuda/kernels.h"

namespace rvllm::cuda {
namespace {

// A thread rotates one pair of one head of one token. grid: [T, pairs of all heads / 128]. arXiv:2104.09864
__global__ void __launch_bounds__(128) rope_kernel(float* x, int64_t stride, int heads, int head_dim,
                                                   const float* __restrict__ cos_sin, int half, bool interleaved) {
  const int index = blockIdx.y * blockDim.x + threadIdx.x;
  if (index >= heads * half) return;
  const int i = index % half;
  float* const head = x + int64_t(blockIdx.x) * stride + int64_t(index / half) * head_dim;
  float* const first = head + (interleaved ? 2 * i : i);
  float* const second = first + (interleaved ? 1 : half);
  const float c = cos_sin[int64_t(blockIdx.x) * 2 * half + i], s = cos_sin[int64_t(blockIdx.x) * 2 * half + half + i];
  const float a = *first, b = *second;
  *first = a * c - b * s;
  *second = a * s + b * c;
}

}  // namespace

void rope(Tensor x, int head_dim, Tensor cos_sin, bool interleaved, cudaStream_t stream) {
  const int heads = int(x.cols) / head_dim, half = int(cos_sin.cols) / 2;
  rv::launch(rope_kernel, dim3(unsigned(x.rows), unsigned((heads * half + 127) / 128)), 128, 0, stream, x.data,
             x.stride, heads, head_dim, cos_sin.data, half, interleaved);
}

}  // namespace rvllm::cuda
