#include "metal/device_math.h"

constant bool is_layer_norm [[function_constant(0)]];

constant int kRowChunk = 2048;  // elements in threadgroup memory at a time
enum Term : int { kValue, kSquare };

// The sum of (x[i] - mean) or its squares over n elements in 16 lanes; every thread of the group gets it.
inline float ordered_sum(device const float* x, int n, Term term, float mean, threadgroup float* chunk,
                         threadgroup float* result, int thread_index, int num_threads) {
  float sum = 0.0f;
  for (int first = 0; first < n; first += kRowChunk) {
    const int count = min(kRowChunk, n - first);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = thread_index; i < count; i += num_threads) chunk[i] = x[first + i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index < kOrderedLanes)
      for (int i = thread_index; i < count; i += kOrderedLanes) {
        const float v = chunk[i];
        sum = term == kValue ? sum + v : fma(v - mean, v - mean, sum);
      }
  }
  if (thread_index < 32) {
    sum = tree_sum16(sum);
    if (thread_index == 0) result[0] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return result[0];
}

// grid: [T, heads]; a group normalizes args.cols columns of a row. arXiv:1910.07467, arXiv:1607.06450
kernel void norm(constant NormArgs& args [[buffer(0)]],
                 device float* out [[buffer(1)]],
                 device const float* x [[buffer(2)]],
                 device const float* weight [[buffer(3)]],
                 device const float* bias [[buffer(4)]],
                 uint3 group [[threadgroup_position_in_grid]],
                 uint thread_index [[thread_index_in_threadgroup]],
                 uint3 group_size [[threads_per_threadgroup]]) {
  threadgroup float chunk[2048];
  threadgroup float result[1];
  const int n = args.cols, head = int(group.y), index = int(thread_index), threads = int(group_size.x);
  x += long(group.x) * args.x_stride + head * n;
  out += long(group.x) * args.out_stride + head * n;
  if (args.by_head) weight += head * n;
  const float mean =
      is_layer_norm ? ordered_sum(x, n, kValue, 0.0f, chunk, result, index, threads) / float(n) : 0.0f;
  const float squares = ordered_sum(x, n, kSquare, mean, chunk, result, index, threads);
  const float factor = 1.0f / precise::sqrt(squares / float(n) + args.eps);
  for (int i = index; i < n; i += threads) {
    const float y = (is_layer_norm ? x[i] - mean : x[i]) * factor * weight[i];
    out[i] = is_layer_norm && args.has_bias ? y + bias[i] : y;
  }
}
