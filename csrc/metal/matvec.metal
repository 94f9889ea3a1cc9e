// out = x W^T + bias for float weights: a simdgroup makes one row of W times 8 tokens. Element k belongs to lane
// k / 8 % 32, which adds its own in ascending order; the lanes are added as a tree. So a token's numbers do not depend
// on the others.
#include "metal/unpack.h"

constant int kTokens = 8;  // multiplied together
constant int kRun = 8;     // consecutive k of a lane
constant int kRows = 4;    // of a threadgroup

// grid: [rows / kRows, tiles of tokens].
template <class F>
kernel void matvec(constant LinearArgs& args [[buffer(0)]],
                   device float* out [[buffer(1)]],
                   device const uchar* weight [[buffer(2)]],
                   device const float* x [[buffer(3)]],
                   device const float* bias [[buffer(4)]],
                   device const int* tile_expert [[buffer(5)]],
                   device const int* choices [[buffer(6)]],
                   uint2 group [[threadgroup_position_in_grid]],
                   uint lane [[thread_index_in_simdgroup]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constant MatrixArgs& w = args.weight;
  const int row = int(group.x) * kRows + int(simdgroup), first = int(group.y) * kTokens;
  const int expert = args.has_experts ? tile_expert[group.y] : 0;
  if (row >= w.rows || expert < 0) return;
  device const uchar* matrix = weight + expert * w.expert_bytes;
  int tokens[8];  // rows of out; -1: none
  float sums[8] = {};
  for (int t = 0; t < kTokens; ++t)
    tokens[t] = args.has_experts ? choices[first + t] : first + t < args.tokens ? first + t : -1;
  for (int begin = int(lane) * kRun; begin < w.cols; begin += 32 * kRun)
    for (int k = begin; k < min(begin + kRun, w.cols); ++k) {
      const float value = weight_at<F>(matrix, w, row, k);
      for (int t = 0; t < kTokens; ++t)
        if (tokens[t] >= 0) sums[t] = fma(value, x[long(tokens[t] / args.per_source) * args.x_stride + k], sums[t]);
    }
  for (int t = 0; t < kTokens; ++t) {
    const float sum = tree_sum32(sums[t]);
    if (lane == 0 && tokens[t] >= 0)
      out[long(tokens[t]) * args.out_stride + row] = args.has_bias ? sum + bias[expert * w.rows + row] : sum;
  }
}

typedef decltype(matvec<FloatF32>) matvec_t;
template [[host_name("matvec_f32")]] kernel matvec_t matvec<FloatF32>;
template [[host_name("matvec_f16")]] kernel matvec_t matvec<FloatF16>;
template [[host_name("matvec_bf16")]] kernel matvec_t matvec<FloatBF16>;
