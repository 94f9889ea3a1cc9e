#include "cuda/dequantize.h"

namespace rvllm::cuda {
namespace {

// A warp makes a pair of blocks of a tile, 16 rows x 64 k. grid: [tiles, pairs / 8]. Bound by memory.
template <class F>
__global__ void __launch_bounds__(256) dequantize_kernel(__half* out, QuantizedWeights<F> weights, int rows, int cols) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, pair = int(blockIdx.y * 8 + threadIdx.x / 32);
  if (64 * pair >= cols) return;
  const uint8_t* const tile = weights.tiles + blockIdx.x * weights.layout.bytes;
  const uint8_t* const chunk = tile + weights.layout.scales + int64_t(2 * pair / kChunkBlocks) * F::kChunkBytes;
  CodePair<F> codes;
  codes.load(tile, weights.layout, pair, lane);
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    const int first = 64 * pair + 32 * b;
    if (first >= cols) break;
    uint32_t a[4];
    if (b == 0)
      codes.template unpack<0>(weights.codebook, a);
    else
      codes.template unpack<1>(weights.codebook, a);
    Scale<F> scales[2];
    scales[0].load(chunk, g, (2 * pair + b) % kChunkBlocks);
    scales[1].load(chunk, g + 8, (2 * pair + b) % kChunkBlocks);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int row = blockIdx.x * kTileRows + g + 8 * (r % 2);
      if (row >= rows) continue;
      __half values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = From<__half>::f(weight_of(scales[r % 2], weights.unit, a[r], r, i));
      uint2 words;  // one store: from halves, memcpy stores bytes
      memcpy(&words, values, sizeof words);
      *reinterpret_cast<uint2*>(out + int64_t(row) * cols + first + 16 * (r / 2) + 4 * t) = words;
    }
  }
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
  const dim3 grid(unsigned((w.rows + kTileRows - 1) / kTileRows), unsigned((w.cols + 511) / 512));
  with_format(w.format, [&](auto format) {
    using F = decltype(format);
    rv::launch(dequantize_kernel<F>, grid, 256, 0, stream, static_cast<__half*>(out), QuantizedWeights<F>(w),
               int(w.rows), int(w.cols));
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
