// The kernel table: one per instruction set, every entry a single-threaded function over a range of rows or tiles.
//
// All tables compute the same bits. Integer dot products are exact, float reductions run over 16 fixed lanes, and the
// order of every float operation is written once (float_kernels.inl, linear_kernels.inl) over a 16-lane vector type.
// No STL here: the ISA files include it.
#pragma once

#include <stdint.h>

#include "activation.h"
#include "cpu/packed.h"
#include "kv_cache.h"

namespace rvllm {

// Activations as int8 with one scale for each block of 32 k: x = scale * q. K is a multiple of 32. Blocks of the same k
// lie together: rows at a stride of K would share a few sets of the first-level cache.
struct QuantizedRows {
  int8_t* q;            // [K / 32, T, 32]
  float* scale;         // [K / 32, T]
  float* scaled_sum;    // [K / 32, T]      scale * sum of q over the block
  int32_t* sum;         // [K / 32, T]
  int32_t* half_sum;    // [K / 32, T, 2]   sums over 16
  int64_t rows;         // T

  int64_t at(int64_t block, int64_t row) const { return block * rows + row; }
};

struct LinearArgs {
  const uint8_t* weight;  // packed tiles
  int64_t tile_bytes;     // from one tile to the next
  const Codebook* codebook;  // read by formats that have one
  int k;                  // K, columns of the weight
  int n;                  // N, its rows; the last tile may hold fewer than 16
  int rows;               // T
  const float* x;         // [T, K], row stride x_stride: read by float weights
  int64_t x_stride;
  QuantizedRows xq;       // read by quantized weights
  const float* bias;      // [N] or null
  float* out;             // [T, N], row stride out_stride
  int64_t out_stride;
};

struct UnpackRowArgs {
  const uint8_t* tile;
  int column;                // of the tile
  int k;
  const Codebook* codebook;
};

constexpr int kRowBlock = 64;  // rows whose activations and sums stay in the first-level cache with a chunk of codes

constexpr int kPartition = 256;   // positions of context worked on at a time; partitions are merged in ascending order
constexpr int kMaxQueryRows = 32; // query rows (tokens x heads of one KV head) worked on together

constexpr int kRunBlocks = 16;

// Where one layer and KV head keeps its blocks. A run of kRunBlocks of them lies together: a request's blocks are
// mostly consecutive, and memory is read faster in long stretches.
struct HeadBlocks {
  uint8_t* data;        // of block 0
  int64_t block_bytes;  // keys, then values
  int64_t run_stride;   // bytes from one run to the next

  uint8_t* block(int id) const { return data + id / kRunBlocks * run_stride + id % kRunBlocks * block_bytes; }
};

struct AttentionArgs {
  const float* q[kMaxQueryRows];    // rows of D floats
  int first[kMaxQueryRows];         // visible positions of a row: [first, last)
  int last[kMaxQueryRows];
  int rows;
  int head_dim;
  int block_size;
  const int32_t* block_table;
  HeadBlocks cache;
  float scale;
  float soft_cap;                   // 0: none
};

// One head's keys in a block are [D, block_size] and its values [block_size, D]; behind the codes of kQ8_0 lie their
// scales, [ceil(D / 32), block_size] and [block_size, ceil(D / 32)] floats.
constexpr int64_t kv_code_bytes(KVType type, int head_dim, int block_size) {
  const int64_t elements = int64_t(head_dim) * block_size;
  switch (type) {
    case KVType::kF32: return 4 * elements;
    case KVType::kF16:
    case KVType::kBF16: return 2 * elements;
    case KVType::kQ8_0: break;
  }
  return (elements + 3) / 4 * 4;
}

constexpr int64_t kv_matrix_bytes(KVType type, int head_dim, int block_size) {
  const int scales = type == KVType::kQ8_0 ? (head_dim + kKVScaleBlock - 1) / kKVScaleBlock : 0;
  return kv_code_bytes(type, head_dim, block_size) + int64_t(4) * scales * block_size;
}

constexpr int padded_head_dim(int head_dim) { return (head_dim + 15) / 16 * 16; }

// Attention over part of the context: softmax numerators and weighted values relative to the largest score.
// A total of 0 says that nothing of the part was visible, or that nothing has been merged yet.
struct AttentionPart {
  float* largest;  // [rows]
  float* total;    // [rows]
  float* values;   // [rows, padded_head_dim(D)]
};

// One token's router. Where they are sigmoids or have a bias, the scores of all experts are left in the logits' place.
struct RouteArgs {
  float* logits;      // [E]
  const float* bias;  // [E] or null
  int num_experts;    // E
  int num_used;
  bool normalized;
  float least_total;  // what normalized scores are divided by at least
  bool sigmoid;
  float scale;
  int32_t* experts;  // [num_used]
  float* weights;    // [num_used]
};

struct Kernels {
  const char* name;

  // out[:, tile columns] = x W^T + bias for the tiles [begin, end).
  void (*linear[kNumPackedTypes])(const LinearArgs& args, int begin, int end);

  // One row of a weight as floats [K].
  void (*unpack_row[kNumPackedTypes])(const UnpackRowArgs& args, float* out);

  // Row t of x ([T, K], stride x_stride) to int8 blocks, for t in [begin, end). The scale of a block that holds an
  // infinity or NaN is NaN.
  void (*quantize_rows)(const float* x, int64_t x_stride, int k, const QuantizedRows& out, int begin, int end);

  // out[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i] over n elements; out may be x. arXiv:1910.07467
  void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* out);

  // out[i] = (x[i] - mean) / sqrt(variance + eps) * weight[i] + bias[i] over n elements; bias may be null, out may be
  // x. arXiv:1607.06450
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int n, float* out);

  // Rotates dim elements of each of `heads` consecutive vectors of head_dim, in place. cos_sin: [dim / 2] cosines, then
  // as many sines. interleaved: pairs (2i, 2i + 1), else (i, i + dim / 2). arXiv:2104.09864
  void (*rope)(float* x, int heads, int head_dim, int dim, bool interleaved, const float* cos_sin);

  // n elements; of a gated activation x holds n gates, then n ups. out must not overlap x.
  void (*activate)(const float* x, Activation activation, int n, float* out);

  void (*add)(float* x, const float* y, float scale, int n);  // x += scale * y

  // The experts of a token, those with the highest biased scores first and of equal ones the first, and their weights;
  // see RouterParams.
  void (*route)(const RouteArgs& args);

  float (*sigmoid)(float x);

  // x *= factor, and then x = soft_cap * tanh(x / soft_cap) unless soft_cap is 0.
  void (*scale)(float* x, float factor, float soft_cap, int n);

  // Writes one head's K and V (D floats each) at offset `slot` of a block. Values beyond f16 saturate; infinities and
  // NaN become NaN in f16 and in the scales of q8_0.
  void (*store_kv[kNumKVTypes])(const float* k, const float* v, int head_dim, int block_size, int slot, uint8_t* block);

  // Softmax numerators of q K^T * scale and their sums of V over positions [begin, begin + kPartition), of which at
  // least one row must see one; begin is a multiple of kPartition. arXiv:2309.06180
  void (*attend_partition[kNumKVTypes])(const AttentionArgs& args, int begin, const AttentionPart& out);

  // Adds a partition to the sum of those before it. arXiv:1805.02867
  void (*merge_partition)(int rows, int head_dim, const AttentionPart& part, const AttentionPart& sum);

  // What is left of linear without unpacking and scales, for the ceiling of its rate: x [kMaxChunk, kRowBlock, 32]
  // times a chunk of codes below 16, [kMaxChunk][kTileCodes]; out [kRowBlock, kTileCols].
  void (*dot_products)(const uint8_t* codes, const int8_t* x, float* out);
};

const Kernels& kernels_scalar() noexcept;
#if defined(__x86_64__)
const Kernels& kernels_avx2() noexcept;
const Kernels& kernels_avx_vnni() noexcept;
const Kernels& kernels_avx512_vnni() noexcept;
const Kernels& kernels_amx() noexcept;
#elif defined(__aarch64__)
const Kernels& kernels_neon() noexcept;
const Kernels& kernels_neon_i8mm() noexcept;
#endif

}  // namespace rvllm
