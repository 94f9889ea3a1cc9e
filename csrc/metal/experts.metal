// Mixture of experts: the choice of experts, the order of the choices, and the sum of what they made. arXiv:1701.06538
#include "metal/device_math.h"

inline float sum_of_exps(threadgroup const float* x, float largest, int n, int lane) {
  float sum = 0.0f;
  for (int i = lane % kOrderedLanes; i < n; i += kOrderedLanes) sum = sum + ordered_exp(x[i] - largest);
  return tree_sum16(sum);
}

// A simdgroup chooses for one token, in the order of csrc/cpu/expert_kernels.inl. grid: [T].
kernel void route(constant ExpertArgs& args [[buffer(0)]],
                  device const float* logits [[buffer(1)]],
                  device int* all_experts [[buffer(2)]],    // [choices]
                  device float* all_weights [[buffer(3)]],  // [choices]
                  device const float* bias [[buffer(4)]],   // [E] or none
                  uint token [[threadgroup_position_in_grid]],
                  uint lane_index [[thread_index_in_simdgroup]]) {
  threadgroup float scores[1024];
  threadgroup float preferences[1024];
  threadgroup int chosen[1024];
  const int lane = int(lane_index), k = args.num_used;
  const bool has_scores = args.sigmoid || args.has_bias;  // else logits are in the same order
  for (int e = lane; e < args.num_experts; e += 32) {
    const float logit = logits[long(token) * args.stride + e];
    scores[e] = args.sigmoid ? 1.0f / (1.0f + ordered_exp(-logit)) : logit;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (args.has_bias && !args.sigmoid) {
    float largest = scores[0];
    for (int e = 1; e < args.num_experts; ++e) largest = scores[e] > largest ? scores[e] : largest;
    const float sum = sum_of_exps(scores, largest, args.num_experts, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int e = lane; e < args.num_experts; e += 32) scores[e] = ordered_exp(scores[e] - largest) / sum;
  }
  for (int e = lane; e < args.num_experts; e += 32) preferences[e] = args.has_bias ? scores[e] + bias[e] : scores[e];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) {
    int found = 0;
    for (int e = 0; e < args.num_experts; ++e) {
      int at = found;
      // Of equal ones the lower index stays ahead; a NaN goes first, so that it is not lost.
      while (at > 0 && !(preferences[e] <= preferences[chosen[at - 1]]) &&
             preferences[chosen[at - 1]] == preferences[chosen[at - 1]])
        --at;
      if (at == k) continue;
      if (found < k) ++found;
      for (int i = found - 1; i > at; --i) chosen[i] = chosen[i - 1];
      chosen[at] = e;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float largest = scores[chosen[0]];
  const float sum = args.normalized || has_scores ? 1.0f : sum_of_exps(scores, largest, args.num_experts, lane);
  if (lane != 0) return;
  float total = 0.0f;
  for (int i = 0; i < k; ++i) {
    const float score = scores[chosen[i]];
    preferences[i] = has_scores ? score : ordered_exp(score - largest);  // their weights from here on
    total += preferences[i];
  }
  if (total < args.least_total) total = args.least_total;
  for (int i = 0; i < k; ++i) {
    all_experts[long(token) * k + i] = chosen[i];
    all_weights[long(token) * k + i] = preferences[i] / (args.normalized ? total : sum) * args.scale;
  }
}

// One group sorts all choices by expert, a thread for each: those of an expert begin at a multiple of 8.
[[max_total_threads_per_threadgroup(1024)]]
kernel void sort_choices(constant ExpertArgs& args [[buffer(0)]],
                         device const int* experts [[buffer(1)]],
                         device int* places [[buffer(2)]],       // [choices]
                         device int* choices [[buffer(3)]],      // [places]  -1: none
                         device int* tile_expert [[buffer(4)]],  // [tiles]   -1: none
                         uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup int first_place[1025];
  const int e = int(thread_index), n = args.num_choices;
  int count = 0;
  for (int i = 0; i < n; ++i) count += experts[i] == e ? 1 : 0;
  first_place[e + 1] = (count + 7) / 8 * 8;
  if (e == 0) first_place[0] = 0;
  for (int i = e; i < 8 * args.num_tiles; i += 1024) choices[i] = -1;
  for (int i = e; i < args.num_tiles; i += 1024) tile_expert[i] = -1;
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  if (e == 0)
    for (int i = 0; i < 1024; ++i) first_place[i + 1] += first_place[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int place = first_place[e];
  for (int i = 0; i < n; ++i) {
    if (experts[i] != e) continue;
    places[i] = place;
    choices[place++] = i;
  }
  for (int tile = first_place[e] / 8; tile < first_place[e + 1] / 8; ++tile) tile_expert[tile] = e;
}

// A thread sums one column of a token's choices, best first. grid: [T, columns / 256].
kernel void combine(constant ExpertArgs& args [[buffer(0)]],
                    device float* out [[buffer(1)]],
                    device const float* y [[buffer(2)]],
                    device const float* weights [[buffer(3)]],
                    uint2 group [[threadgroup_position_in_grid]],
                    uint thread_index [[thread_index_in_threadgroup]]) {
  const int i = int(group.y * 256 + thread_index);
  if (i >= args.cols) return;
  float sum = 0.0f;
  for (int j = 0; j < args.num_used; ++j) {
    const long choice = long(group.x) * args.num_used + j;
    sum += weights[choice] * y[choice * args.stride + i];
  }
  out[long(group.x) * args.out_stride + i] = sum;
}
