// The kernels of the CUDA backend as functions of the host; each puts its work on the stream. Every kernel says there
// which thread computes what. Letters: T tokens, H heads, D head dim, N out, K in.
#pragma once

#include <cstdint>

#include "backend.h"
#include "cuda/cuda_kv_cache.h"
#include "cuda/gpu.h"
#include "cuda/packed_weights.h"

namespace rvllm::cuda {

// A matrix on the device, or some rows of a stack of them. Quantized weights: tiles of packed_weights.h; float weights:
// as in the file.
struct DeviceMatrix {
  int format = -1;      // of with_format; -1: float weights of `type`
  GgmlType type = GgmlType::F32;
  int64_t rows = 0;     // N
  int64_t cols = 0;     // K
  int64_t first_row = 0;  // in the stack
  int64_t tile_bytes = 0;
  const uint8_t* data = nullptr;
  int64_t expert_bytes = 0;  // from one expert to the next, where there are several
  uint4 codebook = {};  // 16 values, of formats that have one
  float unit = 1;       // a factor of d
};

// Activations as int8 in blocks of 32 k, x = scale * q, as csrc/cpu/kernels.h has them. Tokens go in tiles of 8, of
// which `together` lie side by side, block after block: many_tokens_kernel reads all of them at fixed distances. Codes
// are in the order in which mma_k32 takes them: lane 4 g + t has, of token g of a tile and of token g of the next, k
// 4t.. and 16 + 4t..
struct QuantizedRows {
  static constexpr int kTilesTogether = 8;  // of a block of many_tokens_kernel
  int tiles = 0;     // of tokens
  int together = 0;  // two where all are two, else kTilesTogether
  int blocks = 0;    // K / 32
  uint4* q;          // [tiles / together, blocks, together / 2, 32]
  float4* scale;     // [tiles / together, blocks, together, 4]  of tokens 2t and 2t + 1 scales, then scales * sums
  int4* half_sum;    // [tiles / together, blocks, together, 4]  of tokens 2t and 2t + 1 the sums of q over 16

  // Where a tile begins, in fours of scale and half_sum.
  __host__ __device__ int64_t place(int tile, int block) const {
    return (int64_t(tile / kTilesTogether) * blocks + block) * together + tile % kTilesTogether;
  }
  static int64_t tiles_of(int64_t rows) {
    const int64_t tiles = (rows + 7) / 8;
    return tiles <= 2 ? 2 : (tiles + kTilesTogether - 1) / kTilesTogether * kTilesTogether;
  }
  static int64_t bytes(int64_t rows, int64_t k) { return tiles_of(rows) * (k / 32) * (256 + 128); }
  static QuantizedRows at(void* memory, int64_t rows, int64_t k) {
    QuantizedRows out;
    out.tiles = int(tiles_of(rows));
    out.together = out.tiles < kTilesTogether ? out.tiles : kTilesTogether;
    out.blocks = int(k / 32);
    out.q = static_cast<uint4*>(memory);
    out.scale = reinterpret_cast<float4*>(out.q + k / 32 * (out.tiles / 2) * 32);
    out.half_sum = reinterpret_cast<int4*>(out.scale + k / 32 * out.tiles * 4);
    return out;
  }
};

constexpr int kMaxExperts = 1024;

// A step's choices of experts: choice i is that of token i / num_used. For products they are sorted by expert, those of
// each begin at a multiple of 8: the place of a choice in this order.
struct ExpertRows {
  int num_used = 0;
  int num_choices = 0;
  int num_tiles = 0;                // of 8 places, at most
  int* experts = nullptr;           // [choices]
  float* weights = nullptr;         // [choices]
  int* places = nullptr;            // [choices]
  int* choices = nullptr;           // [places]  -1: none
  int* tile_expert = nullptr;       // [tiles]   -1: none
};

// What a product is added to as well: rows += scale * product.
struct Residual {
  float* rows = nullptr;  // [T, N]; null: nothing
  int64_t stride = 0;
  float scale = 0;
};

struct NormRow;

// norm.cu, activation.cu, rope.cu, elementwise.cu, embedding.cu: the operations of backend.h.
void norm(Tensor out, Tensor x, const NormRow& row, int n, bool by_head, cudaStream_t stream);
void activate(Tensor out, Tensor x, Activation activation, cudaStream_t stream);
void rope(Tensor x, int head_dim, Tensor cos_sin, bool interleaved, cudaStream_t stream);
void add(Tensor x, Tensor y, float scale, cudaStream_t stream);
void add_gated(Tensor x, Tensor y, Tensor gate, cudaStream_t stream);
void scale_logits(Tensor x, float scale, float soft_cap, cudaStream_t stream);
void argmax(int* out, Tensor x, cudaStream_t stream);  // sampling.cu
void gather_rows(Tensor out, Tensor x, const int* rows, cudaStream_t stream);
void embedding(Tensor out, const DeviceMatrix& table, const int* ids, float scale, cudaStream_t stream);

void store_kv(const KVLayout& cache, Tensor k, Tensor v, const int* slots, cudaStream_t stream);

// quantize.cu: rows of x [T, K] to int8. places: where each goes, or null. Row i is row i / per_source of x.
void quantize(Tensor x, int rows, int per_source, const QuantizedRows& out, const int* places, cudaStream_t stream);
void quantize_norm(const NormRow& row, const QuantizedRows& out, int rows, int k, cudaStream_t stream);
void quantize_activated(Tensor x, Activation activation, const QuantizedRows& out, int k, const int* places,
                        cudaStream_t stream);

// matvec.cu: out[T, N] = x[T, K] W^T + bias for float weights; of experts, choice i takes row i / per_source of x.
void matvec(Tensor out, Tensor x, const DeviceMatrix& w, const float* bias, const ExpertRows& experts, int per_source,
            cudaStream_t stream);

// dequantize.cu: what cuBLAS takes and gives.
void dequantize(void* out, const DeviceMatrix& w, cudaStream_t stream);  // quantized weights to [N, K] F16
void convert(void* out, Tensor x, GgmlType type, cudaStream_t stream);   // [T, K] F32, F16 or BF16
void add_bias(Tensor out, const float* bias, cudaStream_t stream);

// experts.cu
void route(Tensor logits, const RouterParams& params, const float* bias, const ExpertRows& out, cudaStream_t stream);
void combine(Tensor out, Tensor y, const ExpertRows& rows, cudaStream_t stream);

}  // namespace rvllm::cuda
