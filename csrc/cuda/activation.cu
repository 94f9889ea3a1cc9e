#include "cuda/kernels.h"
#include "cuda/rows.h"

namespace rvllm::cuda {
namespace {

// grid: [T, columns / 256]; a thread makes one element.
template <class Row>
__global__ void __launch_bounds__(256) activation_kernel(float* out, int64_t out_stride, Row row, int n) {
  const int i = blockIdx.y * blockDim.x + threadIdx.x;
  row.prepare(int(blockIdx.x), n);
  if (i < n) out[int64_t(blockIdx.x) * out_stride + i] = row.at(i);
}

}  // namespace

void activate(Tensor out, Tensor x, Activation activation, cudaStream_t stream) {
  const int n = int(out.cols);
  with_activation(activation, x.data, x.stride, n, [&](auto row) {
    rv::launch(activation_kernel<decltype(row)>, dim3(unsigned(out.rows), unsigned((n + 255) / 256)), 256, 0, stream,
               out.data, out.stride, row, n);
  });
}

}  // namespace rvllm::cuda
