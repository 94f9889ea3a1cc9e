#include "cuda/dequantize.h"

namespace rvllm::cuda {
namespace {

// One thread a weight; grid: [rows, columns / 256].
template <class Weights>
__global__ void __launch_bounds__(256) dequantize_kernel(__half* out, Weights weights, int cols) {
  const int k = blockIdx.y * blockDim.x + threadIdx.x;
  if (k < cols) out[int64_t(blockIdx.x) * cols + k] = From<__half>::f(weights.at(blockIdx.x, k));
}

// Floats to the type of the weights that they meet; rows of x lie x_stride apart, those of out are dense.
template <class T>
__global__ void __launch_bounds__(256) convert_kernel(T* out, const float* __restrict__ x, int64_t x_stride, int cols) {
  const int k = blockIdx.y * blockDim.x + threadIdx.x;
  if (k < cols) out[int64_t(blockIdx.x) * cols + k] = From<T>::f(x[blockIdx.x * x_stride + k]);
}

__global__ void __launch_bounds__(256) add_bias_kernel(float* out, int64_t stride, const float* __restrict__ bias,
                                                       int cols) {
  const int k = blockIdx.y * blockDim.x + threadIdx.x;
  if (k < cols) out[blockIdx.x * stride + k] += bias[k];
}

dim3 grid_of(int64_t rows, int64_t cols) { return dim3(unsigned(rows), unsigned((cols + 255) / 256)); }

}  // namespace

void dequantize(void* out, const DeviceMatrix& w, cudaStream_t stream) {
  with_weights(w, [&](auto weights) {
    rv::launch(dequantize_kernel<decltype(weights)>, grid_of(w.rows, w.cols), 256, 0, stream, static_cast<__half*>(out),
               weights, int(w.cols));
  });
}

void convert(void* out, Tensor x, GgmlType type, cudaStream_t stream) {
  with_float_type(type, [&](auto value) {
    using T = decltype(value);
    rv::launch(convert_kernel<T>, grid_of(x.rows, x.cols), 256, 0, stream, static_cast<T*>(out), x.data, x.stride,
               int(x.cols));
  });
}

void add_bias(Tensor out, const float* bias, cudaStream_t stream) {
  rv::launch(add_bias_kernel, grid_of(out.rows, out.cols), 256, 0, stream, out.data, out.stride, bias, int(out.cols));
}

}  // namespace rvllm::cuda
