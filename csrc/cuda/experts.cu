// Mixture of experts: the choice of experts, the order of the choices, and the sum of what they made. arXiv:1701.06538
#include "cuda/device_math.h"
#include "cuda/kernels.h"

namespace rvllm::cuda {
namespace {

struct RouteArgs {
  const float* logits;  // [T, E]
  int64_t stride;
  const float* bias;  // [E] or null
  int num_experts;    // E
  bool normalized;
  bool sigmoid;
  float scale;
};

__device__ float sum_of_exps(const float* x, float largest, int n) {
  float sum = 0.0f;
  for (int i = threadIdx.x % kOrderedLanes; i < n; i += kOrderedLanes) sum = sum + ordered_exp(x[i] - largest);
  return tree_sum16(sum);
}

// A warp chooses for one token, in the order of csrc/cpu/expert_kernels.inl. grid: [T].
__global__ void route_kernel(RouteArgs a, ExpertRows out) {
  RV_SHARED(float, scores, kMaxExperts);
  const int lane = threadIdx.x, k = out.num_used;
  int* const experts = out.experts + int64_t(blockIdx.x) * k;
  float* const weights = out.weights + int64_t(blockIdx.x) * k;
  const auto preference = [&](int e) { return a.bias ? scores[e] + a.bias[e] : scores[e]; };
  const bool has_scores = a.sigmoid || a.bias;  // else logits are in the same order
  for (int e = lane; e < a.num_experts; e += 32) {
    const float logit = a.logits[blockIdx.x * a.stride + e];
    scores[e] = a.sigmoid ? 1.0f / (1.0f + ordered_exp(-logit)) : logit;
  }
  __syncwarp();
  if (a.bias && !a.sigmoid) {
    float largest = scores[0];
    for (int e = 1; e < a.num_experts; ++e) largest = scores[e] > largest ? scores[e] : largest;
    const float sum = sum_of_exps(scores, largest, a.num_experts);
    __syncwarp();
    for (int e = lane; e < a.num_experts; e += 32) scores[e] = ordered_exp(scores[e] - largest) / sum;
    __syncwarp();
  }
  if (lane == 0) {
    int found = 0;
    for (int e = 0; e < a.num_experts; ++e) {
      int at = found;
      // Of equal ones the lower index stays ahead; a NaN goes first, so that it is not lost.
      for (; at > 0; --at) {
        const float above = preference(experts[at - 1]);
        if (preference(e) <= above || above != above) break;
      }
      if (at == k) continue;
      if (found < k) ++found;
      for (int i = found - 1; i > at; --i) experts[i] = experts[i - 1];
      experts[at] = e;
    }
  }
  __syncwarp();
  const float largest = scores[experts[0]];
  const float sum = a.normalized || has_scores ? 1.0f : sum_of_exps(scores, largest, a.num_experts);
  if (lane == 0) {
    float total = 0.0f;
    for (int i = 0; i < k; ++i) {
      const float score = scores[experts[i]];
      weights[i] = has_scores ? score : ordered_exp(score - largest);
      total += weights[i];
    }
    if (total < kLeastScores) total = kLeastScores;
    for (int i = 0; i < k; ++i) weights[i] = weights[i] / (a.normalized ? total : sum) * a.scale;
  }
}

// One block sorts all choices by expert, warps taking experts in turn: 32 choices are looked at together.
__global__ void __launch_bounds__(1024) sort_choices_kernel(int num_experts, ExpertRows rows) {
  RV_SHARED(int, first_place, kMaxExperts + 1);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, n = rows.num_choices;
  for (int e = warp; e < num_experts; e += warps) {
    int count = 0;
    for (int i = lane; i - lane < n; i += 32) count += __popc(__ballot_sync(kFullWarp, i < n && rows.experts[i] == e));
    if (lane == 0) first_place[e + 1] = (count + 7) / 8 * 8;
  }
  for (int i = threadIdx.x; i < 8 * rows.num_tiles; i += blockDim.x) rows.choices[i] = -1;
  __syncthreads();
  if (threadIdx.x == 0) {
    first_place[0] = 0;
    for (int e = 0; e < num_experts; ++e) first_place[e + 1] += first_place[e];
  }
  __syncthreads();
  for (int e = warp; e < num_experts; e += warps) {
    int place = first_place[e];
    for (int i = lane; i - lane < n; i += 32) {
      const bool is_mine = i < n && rows.experts[i] == e;
      const unsigned mine = __ballot_sync(kFullWarp, is_mine);
      if (is_mine) {
        const int at = place + __popc(mine & ((1u << lane) - 1));
        rows.places[i] = at;
        rows.choices[at] = i;
      }
      place += __popc(mine);
    }
    for (int tile = first_place[e] / 8 + lane; tile < first_place[e + 1] / 8; tile += 32) rows.tile_expert[tile] = e;
  }
  for (int tile = first_place[num_experts] / 8 + int(threadIdx.x); tile < rows.num_tiles; tile += blockDim.x)
    rows.tile_expert[tile] = -1;
}

// A thread sums one column of a token's choices, best first. grid: [T, columns / 256].
__global__ void __launch_bounds__(256) combine_kernel(float* out, int64_t out_stride, const float* __restrict__ y,
                                                      int64_t y_stride, ExpertRows rows, int cols) {
  const int i = blockIdx.y * blockDim.x + threadIdx.x;
  if (i >= cols) return;
  float sum = 0.0f;
  for (int j = 0; j < rows.num_used; ++j) {
    const int64_t choice = int64_t(blockIdx.x) * rows.num_used + j;
    sum += rows.weights[choice] * y[choice * y_stride + i];
  }
  out[blockIdx.x * out_stride + i] = sum;
}

}  // namespace

void route(Tensor logits, const RouterParams& params, const float* bias, const ExpertRows& out, cudaStream_t stream) {
  const RouteArgs args{logits.data,       logits.stride,  bias,        int(logits.cols),
                       params.normalized, params.sigmoid, params.scale};
  rv::launch(route_kernel, unsigned(logits.rows), 32, 0, stream, args, out);
  rv::launch(sort_choices_kernel, 1, 1024, 0, stream, int(logits.cols), out);
}

void combine(Tensor out, Tensor y, const ExpertRows& rows, cudaStream_t stream) {
  rv::launch(combine_kernel, dim3(unsigned(out.rows), unsigned((out.cols + 255) / 256)), 256, 0, stream, out.data,
             out.stride, y.data, y.stride, rows, int(out.cols));
}

}  // namespace rvllm::cuda
