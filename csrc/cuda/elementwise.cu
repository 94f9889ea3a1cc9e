#include "cuda/device_math.h"
#include "cuda/kernels.h"

namespace rvllm::cuda {
namespace {

// One thread an element; grid: [rows, columns / 256].
__global__ void __launch_bounds__(256) add_kernel(float* x, int64_t x_stride, const float* y, int64_t y_stride,
                                                  int cols, float scale) {
  const int i = blockIdx.y * blockDim.x + threadIdx.x;
  if (i < cols) x[blockIdx.x * x_stride + i] += scale * y[blockIdx.x * y_stride + i];
}

__global__ void __launch_bounds__(256) add_gated_kernel(float* x, int64_t x_stride, const float* y, int64_t y_stride,
                                                        const float* gate, int64_t gate_stride, int cols) {
  const int i = blockIdx.y * blockDim.x + threadIdx.x;
  const float scale = 1.0f / (1.0f + ordered_exp(-gate[blockIdx.x * gate_stride]));
  if (i < cols) x[blockIdx.x * x_stride + i] += scale * y[blockIdx.x * y_stride + i];
}

__global__ void __launch_bounds__(256) scale_logits_kernel(float* x, int64_t stride, int cols, float scale,
                                                           float soft_cap) {
  const int i = blockIdx.y * blockDim.x + threadIdx.x;
  if (i >= cols) return;
  float& value = x[blockIdx.x * stride + i];
  value = value * scale;
  if (soft_cap != 0.0f) value = soft_capped(value, soft_cap);
}

__global__ void __launch_bounds__(256) gather_rows_kernel(float* out, int64_t out_stride, const float* __restrict__ x,
                                                          int64_t x_stride, const int* __restrict__ rows, int cols) {
  const int i = blockIdx.y * blockDim.x + threadIdx.x;
  if (i < cols) out[blockIdx.x * out_stride + i] = x[rows[blockIdx.x] * x_stride + i];
}

dim3 grid_of(Tensor x) { return dim3(unsigned(x.rows), unsigned((x.cols + 255) / 256)); }

}  // namespace

void add(Tensor x, Tensor y, float scale, cudaStream_t stream) {
  rv::launch(add_kernel, grid_of(x), 256, 0, stream, x.data, x.stride, y.data, y.stride, int(x.cols), scale);
}

void add_gated(Tensor x, Tensor y, Tensor gate, cudaStream_t stream) {
  rv::launch(add_gated_kernel, grid_of(x), 256, 0, stream, x.data, x.stride, y.data, y.stride, gate.data, gate.stride,
         int(x.cols));
}

void scale_logits(Tensor x, float scale, float soft_cap, cudaStream_t stream) {
  rv::launch(scale_logits_kernel, grid_of(x), 256, 0, stream, x.data, x.stride, int(x.cols), scale, soft_cap);
}

void gather_rows(Tensor out, Tensor x, const int* rows, cudaStream_t stream) {
  rv::launch(gather_rows_kernel, grid_of(out), 256, 0, stream, out.data, out.stride, x.data, x.stride, rows,
             int(out.cols));
}

}  // namespace rvllm::cuda
