// What makes a row of activations, element by element: norm.cu and activation.cu write it as floats, quantize.cu as
// int8. prepare() is called by every thread of the block before the first element.
#pragma once

#include "activation.h"
#include "cuda/device_math.h"

namespace rvllm::cuda {

constexpr int kRowChunk = 2048;  // elements in shared memory at a time

// f(x[i], sum) over n elements in 16 lanes, by half a warp out of shared memory, [kRowChunk + 1]; every thread of the
// block gets the sum.
template <class F>
__device__ float ordered_sum(const float* x, int n, float* chunk, const F& f) {
  float* const result = chunk + kRowChunk;
  float sum = 0.0f;
  for (int first = 0; first < n; first += kRowChunk) {
    const int count = min(kRowChunk, n - first);
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) chunk[i] = x[first + i];
    __syncthreads();
    if (threadIdx.x < kOrderedLanes)
      for (int i = threadIdx.x; i < count; i += kOrderedLanes) sum = f(chunk[i], sum);
  }
  if (threadIdx.x < 32) {
    sum = tree_sum16(sum);
    if (threadIdx.x == 0) *result = sum;
  }
  __syncthreads();
  return *result;
}

struct PlainRow {  // row `row` of the output is row / per_source of x
  const float* x;
  int64_t stride;
  int per_source;

  __device__ void prepare(int row, int) { x += row / per_source * stride; }
  __device__ float at(int i) const { return x[i]; }
};

struct NormRow {
  const float* x;
  int64_t stride;
  const float* weight;  // [rows, n]: of the heads, or one
  const float* bias;    // [n] or null
  float eps;
  bool is_layer_norm;
  float mean, factor;

  __device__ void prepare(int row, int n) {
    RV_SHARED(float, chunk, kRowChunk + 1);  // here, since each instance of a template would have its own
    x += row * stride;
    if (is_layer_norm) {
      mean = ordered_sum(x, n, chunk, [](float v, float sum) { return sum + v; }) / float(n);
      const float m = mean;
      factor = ordered_sum(x, n, chunk, [m](float v, float sum) { return fmaf(v - m, v - m, sum); });
    } else {
      factor = ordered_sum(x, n, chunk, [](float v, float sum) { return fmaf(v, v, sum); });
    }
    factor = 1.0f / sqrtf(factor / float(n) + eps);
  }
  __device__ float at(int i) const {
    if (!is_layer_norm) return x[i] * factor * weight[i];
    return (x[i] - mean) * factor * weight[i] + (bias ? bias[i] : 0.0f);
  }
};

__device__ __forceinline__ float times_logistic(float x, float z) { return x / (1.0f + ordered_exp(0.0f - z)); }

__device__ __forceinline__ float gelu(float x) {
  return times_logistic(x, 1.5957691216057308f * fmaf(x * x * x, 0.044715f, x));
}

template <Activation kKind>
struct ActivatedRow {
  const float* x;  // gates, then ups, of a gated activation
  int64_t stride;
  int n;

  __device__ void prepare(int row, int) { x += row * stride; }
  __device__ float at(int i) const {
    if constexpr (kKind == Activation::kSiluGated) return times_logistic(x[i], x[i]) * x[n + i];
    if constexpr (kKind == Activation::kGeluGated) return gelu(x[i]) * x[n + i];
    if constexpr (kKind == Activation::kGelu) return gelu(x[i]);
    if constexpr (kKind == Activation::kReluSqr) return 0.0f > x[i] ? 0.0f : x[i] * x[i];
    if constexpr (kKind == Activation::kSwigluOai) {  // bounds come first, so that NaN gets through
      const float gate = 7.0f < x[i] ? 7.0f : x[i], bounded = 7.0f < x[n + i] ? 7.0f : x[n + i];
      const float up = -7.0f > bounded ? -7.0f : bounded;
      return times_logistic(gate, 1.702f * gate) * (up + 1.0f);
    }
    return 0.0f;
  }
};

// Calls f(row maker) with that of an activation.
template <class F>
void with_activation(Activation activation, const float* x, int64_t stride, int n, const F& f) {
  switch (activation) {
    case Activation::kSiluGated: return f(ActivatedRow<Activation::kSiluGated>{x, stride, n});
    case Activation::kGeluGated: return f(ActivatedRow<Activation::kGeluGated>{x, stride, n});
    case Activation::kSwigluOai: return f(ActivatedRow<Activation::kSwigluOai>{x, stride, n});
    case Activation::kGelu: return f(ActivatedRow<Activation::kGelu>{x, stride, n});
    case Activation::kReluSqr: return f(ActivatedRow<Activation::kReluSqr>{x, stride, n});
  }
}

}  // namespace rvllm::cuda
