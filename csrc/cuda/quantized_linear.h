#pragma once

#include "cuda/kernels.h"

namespace rvllm::cuda {

struct QuantizedLinearArgs {
  const uint8_t* weight;  // tiles
  TileLayout layout;
  uint4 codebook;
  float unit;
  int rows;               // N
  int row_tiles;
  int blocks;             // of 32 k
  QuantizedRows x;
  int tokens;
  int token_tiles;
  const float* bias;      // [N] or null
  float* out;             // [T, N]
  int64_t out_stride;
  Residual residual;
  int tiles_a_block;
  int groups_a_block;
  ExpertRows experts;     // of which the tiles of tokens are; tile_expert is null where there is one matrix
  int64_t expert_bytes;   // of weights, from one expert to the next
};

// out[T, N] = x[T, K] W^T + bias. Of experts: x are the rows of ExpertRows::places, out those of the choices.
void quantized_linear(const DeviceMatrix& w, const QuantizedRows& x, int tokens, const ExpertRows& experts,
                      const float* bias, float* out, int64_t out_stride, const Residual& residual, int num_processors,
                      cudaStream_t stream);

// The same for one format, with `warps` warps to share K at most.
template <class F>
void quantized_linear_of(const QuantizedLinearArgs& args, int warps, int num_processors, cudaStream_t stream);

}  // namespace rvllm::cuda
