// Arguments of the kernels, passed by setBytes: the same structs for the compiler of the host and for Metal's.
#pragma once

#if !defined(__METAL_VERSION__)
#include <cstdint>
#endif

namespace rvllm {

// A matrix [rows, cols] of weights: tiles of cuda/packed_weights.h where it is quantized, else as in the file.
struct MatrixArgs {
  int64_t tile_bytes;
  int64_t high;          // where parts of a tile begin
  int64_t scales;
  int64_t expert_bytes;  // from one expert to the next
  int rows, cols;        // N, K
  float unit;            // a factor of d
  int8_t codebook[16];   // of formats that have one
};

struct EmbeddingArgs {
  MatrixArgs table;
  int out_stride;
  float scale;
};

struct LinearArgs {
  MatrixArgs weight;
  int tokens;       // rows of out
  int x_stride;     // of float activations
  int per_source;   // rows of out that take one row of x
  int out_stride;
  int has_bias;
  int has_experts;  // tiles of tokens are those of ExpertArgs
};

struct QuantizeArgs {
  int x_stride;
  int per_source;
  int cols;
  int has_places;
};

struct NormArgs {
  int x_stride, out_stride;
  int cols;      // normalized together
  int by_head;   // each has weights of its own
  int has_bias;  // layer norm
  float eps;
};

// Elementwise kernels.
struct RowArgs {
  int x_stride, y_stride, z_stride;
  int cols;
  float scale, soft_cap;
};

struct RopeArgs {
  int stride;
  int heads, head_dim, half_width;  // half the elements of a head that are rotated
};

// How keys and values of one layer lie: cuda/cuda_kv_cache.h.
struct CacheArgs {
  int64_t code_bytes, matrix_bytes, block_bytes;
  int block_size, head_dim, padded_dim, scales;
};

struct StoreArgs {
  CacheArgs cache;
  int k_stride, v_stride;
};

struct AttentionArgs {
  CacheArgs cache;
  int q_stride, out_stride, max_blocks;
  int num_heads;
  int group;         // query heads of one KV head
  int heads_a_unit;  // of them, worked on together
  int window;        // 0: all
  int num_parts;     // partitions that are kept for the merge; 0: none
  int has_sinks;
  float scale, soft_cap;
};

struct ExpertArgs {
  int stride;  // of logits, or of rows to combine
  int out_stride;
  int num_experts, num_used, num_choices, num_tiles;
  int cols;
  int normalized, sigmoid, has_bias;
  float scale, least_total;
};

}  // namespace rvllm
