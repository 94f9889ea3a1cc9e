// out = x W^T + bias for many tokens, by 8 x 8 matrices of a simdgroup. All is float32: weights as they are
// dequantized, activations as they are. Eight k at a time are added in ascending order, among themselves in an order of
// the GPU's own; so the numbers are not the CPU's to the bit. A token's do not depend on the others if the GPU treats
// all rows of a matrix alike.
#include "metal/unpack.h"

constant int kBlockRows = 64;    // of W, that a threadgroup of four simdgroups multiplies
constant int kBlockTokens = 32;
constant int kStride = 36;       // from one row of 32 k to the next, so that eight rows begin in different banks

// Puts one block of 32 k of a tile of 16 rows into threadgroup memory. low, high: kept from an even block for the next.
template <class F>
inline void stage_weights(threadgroup float* staged, device const uchar* matrix, constant MatrixArgs& m, int row_tile,
                          int block, int lane, thread uint (&low)[8], thread uint (&high)[2]) {
  device const uchar* tile = matrix + row_tile * m.tile_bytes;
  device const uchar* chunk = tile + m.scales + block / kChunkBlocks * F::kChunkBytes;
  uint a[4];
  if (block % 2 == 0) load_codes<F>(tile, m, block / 2, lane, low, high);
  unpack_codes<F>(low, high, block % 2, m, a);
  for (int r = 0; r < 4; ++r) {
    const int row = lane / 4 + 8 * (r % 2), half_block = r / 2;
    const float2 factors = load_factors<F>(chunk, row, block % kChunkBlocks, half_block, m.unit);
    threadgroup float* words = staged + row * kStride + 16 * half_block + 4 * (lane % 4);
    for (int i = 0; i < 4; ++i) words[i] = weight_of<F>(uchar(a[r] >> 8 * i), factors);
  }
}

template <class F>
inline void stage_floats(threadgroup float* staged, device const uchar* matrix, constant MatrixArgs& m, int row_tile,
                         int block, int lane) {
  const int k = 32 * block + lane;
  for (int r = 0; r < kTileRows; ++r) {
    const int row = row_tile * kTileRows + r;
    staged[r * kStride + lane] = row < m.rows && k < m.cols ? weight_at<F>(matrix, m, row, k) : 0.0f;
  }
}
template <>
inline void stage_weights<FloatF16>(threadgroup float* staged, device const uchar* matrix, constant MatrixArgs& m,
                                    int row_tile, int block, int lane, thread uint (&)[8], thread uint (&)[2]) {
  stage_floats<FloatF16>(staged, matrix, m, row_tile, block, lane);
}
template <>
inline void stage_weights<FloatBF16>(threadgroup float* staged, device const uchar* matrix, constant MatrixArgs& m,
                                     int row_tile, int block, int lane, thread uint (&)[8], thread uint (&)[2]) {
  stage_floats<FloatBF16>(staged, matrix, m, row_tile, block, lane);
}

// grid: [rows / kBlockRows, tokens / kBlockTokens]; simdgroup s makes tokens 16 (s / 2).. and rows 32 (s % 2).. of the
// block. Rows and tokens beyond the last have any values, and are never written.
template <class F>
kernel void matmul(constant LinearArgs& args [[buffer(0)]],
                   device float* out [[buffer(1)]],
                   device const uchar* weight [[buffer(2)]],
                   device const float* x [[buffer(3)]],
                   device const float* bias [[buffer(4)]],
                   uint2 group [[threadgroup_position_in_grid]],
                   uint thread_index [[thread_index_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float staged[3456];  // weights [64, kStride], then activations [32, kStride]; last [32, 64] of out
  constant MatrixArgs& w = args.weight;
  const int s = int(simdgroup), tid = int(thread_index);
  const int first_row = int(group.x) * kBlockRows, first_token = int(group.y) * kBlockTokens;
  const int row_tile = first_row / kTileRows + s;
  threadgroup float* activations = staged + kBlockRows * kStride;
  threadgroup const float* left_rows = activations + 16 * (s / 2) * kStride;
  threadgroup const float* right_rows = staged + 32 * (s % 2) * kStride;
  simdgroup_float8x8 sums[2][4];
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 4; ++j) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  uint low[8] = {}, high[2] = {};
  for (int block = 0; block < (w.cols + 31) / 32; ++block) {
    if (row_tile * kTileRows < w.rows)
      stage_weights<F>(staged + kTileRows * s * kStride, weight, w, row_tile, block, int(lane), low, high);
    for (int i = tid; i < kBlockTokens * 32; i += 128) {
      const int token = first_token + i / 32, k = 32 * block + i % 32;
      activations[i / 32 * kStride + i % 32] =
          token < args.tokens && k < w.cols ? x[long(token) * args.x_stride + k] : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int k = 0; k < 32; k += 8) {
      simdgroup_float8x8 left[2], right[4];
      for (int i = 0; i < 2; ++i) simdgroup_load(left[i], left_rows + 8 * i * kStride + k, ulong(kStride));
      for (int j = 0; j < 4; ++j)
        simdgroup_load(right[j], right_rows + 8 * j * kStride + k, ulong(kStride), ulong2(0, 0), true);
      for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 4; ++j) simdgroup_multiply_accumulate(sums[i][j], left[i], right[j], sums[i][j]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  threadgroup float* results = staged + 16 * (s / 2) * kBlockRows + 32 * (s % 2);
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 4; ++j)
      simdgroup_store(sums[i][j], results + 8 * i * kBlockRows + 8 * j, ulong(kBlockRows));
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = tid; i < kBlockTokens * kBlockRows; i += 128) {
    const int token = first_token + i / kBlockRows, row = first_row + i % kBlockRows;
    if (token < args.tokens && row < w.rows)
      out[long(token) * args.out_stride + row] = args.has_bias ? staged[i] + bias[row] : staged[i];
  }
}

typedef decltype(matmul<FormatQ4_0>) matmul_t;
template [[host_name("matmul_q4_0")]] kernel matmul_t matmul<FormatQ4_0>;
template [[host_name("matmul_q4_1")]] kernel matmul_t matmul<FormatQ4_1>;
template [[host_name("matmul_q5_0")]] kernel matmul_t matmul<FormatQ5_0>;
template [[host_name("matmul_q5_1")]] kernel matmul_t matmul<FormatQ5_1>;
template [[host_name("matmul_q8_0")]] kernel matmul_t matmul<FormatQ8_0>;
template [[host_name("matmul_q2_k")]] kernel matmul_t matmul<FormatQ2_K>;
template [[host_name("matmul_q3_k")]] kernel matmul_t matmul<FormatQ3_K>;
template [[host_name("matmul_q4_k")]] kernel matmul_t matmul<FormatQ4_K>;
template [[host_name("matmul_q5_k")]] kernel matmul_t matmul<FormatQ5_K>;
template [[host_name("matmul_q6_k")]] kernel matmul_t matmul<FormatQ6_K>;
template [[host_name("matmul_tq")]] kernel matmul_t matmul<FormatTQ>;
template [[host_name("matmul_iq")]] kernel matmul_t matmul<FormatIQ>;
template [[host_name("matmul_iq16")]] kernel matmul_t matmul<FormatIQ16>;
template [[host_name("matmul_iq4_nl")]] kernel matmul_t matmul<FormatIQ4_NL>;
template [[host_name("matmul_mxfp4")]] kernel matmul_t matmul<FormatMXFP4>;
template [[host_name("matmul_f16")]] kernel matmul_t matmul<FloatF16>;
template [[host_name("matmul_bf16")]] kernel matmul_t matmul<FloatBF16>;
