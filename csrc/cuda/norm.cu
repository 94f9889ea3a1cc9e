#include "cuda/kernels.h"
#include "cuda/rows.h"

namespace rvllm::cuda {
namespace {

// grid: [T, heads]; a block normalizes n columns of a row, out of which every thread writes each blockDim.x-th.
__global__ void __launch_bounds__(256) norm_kernel(float* out, int64_t out_stride, NormRow row, int n, bool by_head) {
  row.x += int64_t(blockIdx.y) * n;
  out += int64_t(blockIdx.x) * out_stride + int64_t(blockIdx.y) * n;
  if (by_head) row.weight += int64_t(blockIdx.y) * n;
  row.prepare(int(blockIdx.x), n);
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = row.at(i);
}

}  // namespace

void norm(Tensor out, Tensor x, const NormRow& row, int n, bool by_head, cudaStream_t stream) {
  const unsigned threads = n <= 128 ? 32 : n <= 512 ? 64 : 256;
  rv::launch(norm_kernel, dim3(unsigned(x.rows), unsigned(x.cols / n)), threads, 0, stream, out.data, out.stride, row,
             n, by_head);
}

}  // namespace rvllm::cuda
