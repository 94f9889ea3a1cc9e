#pragma once

#include "cuda/cuda_kv_cache.h"
#include "cuda/kernels.h"
#include "step_arrays.h"

namespace rvllm::cuda {

constexpr int kMaxQueryRows = 16;   // query rows (tokens x heads of one KV head) that share reads of keys and values
constexpr int kMaxHeadDim = 256;

struct AttentionArgs {
  KVLayout cache;  // of the layer
  const float* q;  // [T, H * D]
  int64_t q_stride;
  float* out;      // [T, H * D]
  int64_t out_stride;
  const AttentionUnit* units;
  const int* positions;     // [T]
  const int* block_tables;  // [B, max_blocks]; what the window has left is never read
  int max_blocks;
  int num_heads;
  int group;                // query heads of one KV head
  int heads_a_unit;         // of them, worked on together
  int window;               // 0: all
  float scale, soft_cap;
  const float* sinks;       // [H] or null
  float* parts;             // null, or where partitions are kept: [T, H, num_parts, 2 + D]
  int num_parts;
};

// Attention of num_units units. rows: the most query rows of a unit, at most kMaxQueryRows. arXiv:2309.06180
void attention(const AttentionArgs& args, int num_units, int rows, int num_tokens, cudaStream_t stream);

}  // namespace rvllm::cuda
