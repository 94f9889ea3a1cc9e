// out = x W^T + bias for float weights and few tokens: a warp makes one row of W times 8 tokens. Element k belongs to
// lane k / 8 % 32, which adds its own in ascending order; the lanes are added as a tree. So a token's numbers do not
// depend on the others. Reads of W are 16 bytes a lane; bound by memory.
#include "cuda/dequantize.h"

namespace rvllm::cuda {
namespace {

constexpr int kTokens = 8;  // multiplied together
constexpr int kRun = 8;     // consecutive k of a lane

struct MatvecArgs {
  const float* x;       // [T, K]
  int64_t x_stride;
  const float* bias;    // [N] or null
  float* out;           // [T, N]
  int64_t out_stride;
  int tokens, rows, cols;
  ExpertRows experts;
  int64_t expert_elements;
  int per_source;
};

template <class T>
__device__ __forceinline__ void load_run(const T* w, bool aligned, int count, float (&values)[kRun]) {
  if (aligned) {
    constexpr int kWords = kRun * sizeof(T) / 16;
    uint4 words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = __ldg(reinterpret_cast<const uint4*>(w) + i);
    T elements[kRun];
    memcpy(elements, words, sizeof elements);
#pragma unroll
    for (int i = 0; i < kRun; ++i) values[i] = to_f(elements[i]);
  } else {
    for (int i = 0; i < kRun; ++i) values[i] = i < count ? to_f(w[i]) : 0.0f;
  }
}

template <class T>
__global__ void __launch_bounds__(128) matvec_kernel(MatvecArgs a, const T* __restrict__ w) {
  const int lane = threadIdx.x, row = blockIdx.x * blockDim.y + threadIdx.y, first = blockIdx.y * kTokens;
  if (row >= a.rows) return;
  const bool aligned = a.cols % kRun == 0;
  const int expert = a.experts.tile_expert ? a.experts.tile_expert[blockIdx.y] : 0;
  if (expert < 0) return;
  w += expert * a.expert_elements;
  int tokens[kTokens];  // rows of out; -1: none
#pragma unroll
  for (int t = 0; t < kTokens; ++t)
    tokens[t] = a.experts.tile_expert ? a.experts.choices[first + t] : first + t < a.tokens ? first + t : -1;
  float sums[kTokens] = {};
  for (int k = lane * kRun; k < a.cols; k += 32 * kRun) {
    const int run = min(kRun, a.cols - k);
    float values[kRun];
    load_run(w + int64_t(row) * a.cols + k, aligned, run, values);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (tokens[t] < 0) continue;
      const float* const x = a.x + tokens[t] / a.per_source * a.x_stride + k;
      for (int i = 0; i < run; ++i) sums[t] = fmaf(values[i], x[i], sums[t]);
    }
  }
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    const float sum = warp_sum(sums[t]);
    if (lane == 0 && tokens[t] >= 0)
      a.out[tokens[t] * a.out_stride + row] = a.bias ? sum + a.bias[int64_t(expert) * a.rows + row] : sum;
  }
}

}  // namespace

void matvec(Tensor out, Tensor x, const DeviceMatrix& w, const float* bias, const ExpertRows& experts, int per_source,
            cudaStream_t stream) {
  const unsigned tiles = unsigned(experts.tile_expert ? experts.num_tiles : (out.rows + kTokens - 1) / kTokens);
  with_float_type(w.type, [&](auto value) {
    using T = decltype(value);
    const MatvecArgs args{x.data,        x.stride,     bias,    out.data,
                          out.stride,    int(out.rows), int(w.rows), int(w.cols),
                          experts, w.expert_bytes / int64_t(sizeof(T)), per_source};
    rv::launch(matvec_kernel<T>, dim3(unsigned((w.rows + 3) / 4), tiles), dim3(32, 4), 0, stream, args,
               reinterpret_cast<const T*>(w.data));
  });
}

}  // namespace rvllm::cuda
