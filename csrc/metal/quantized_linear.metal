// out = x W^T + bias for quantized weights, on int8 activations. Every float operation is one of
// csrc/cpu/linear_kernels.inl in the same order, whatever the number of tokens.
//
// A simdgroup owns 16 rows of W times one token, or 8. Lane 4 g + t has, of rows g and g + 8, k 4t.. and 16 + 4t.. of
// each block of 32; the sums of the four lanes of a row are added by shuffles, so that each lane gets some of the
// outputs.
#include "metal/unpack.h"

constant int kSimdgroups = 4;  // of a threadgroup

template <class F>
inline int dot4(uint codes, uint x) {
  const char4 b = as_type<char4>(x);
  if (F::kSigned) {
    const char4 a = as_type<char4>(codes);
    return int(a.x) * int(b.x) + int(a.y) * int(b.y) + int(a.z) * int(b.z) + int(a.w) * int(b.w);
  }
  const uchar4 a = as_type<uchar4>(codes);
  return int(a.x) * int(b.x) + int(a.y) * int(b.y) + int(a.z) * int(b.z) + int(a.w) * int(b.w);
}

// Adds the values of four neighbouring lanes; lane t gets the sum of value t.
inline int sum_four(int v0, int v1, int v2, int v3, int t) {
  const bool is_odd = t % 2 == 1, is_high = t >= 2;
  const int first = (is_odd ? v1 : v0) + simd_shuffle_xor(is_odd ? v0 : v1, ushort(1));
  const int second = (is_odd ? v3 : v2) + simd_shuffle_xor(is_odd ? v2 : v3, ushort(1));
  return (is_high ? second : first) + simd_shuffle_xor(is_high ? first : second, ushort(2));
}

// The same of two values; lane t gets the sum of value t % 2.
inline int sum_two(int v0, int v1, int t) {
  const bool is_odd = t % 2 == 1;
  const int sum = (is_odd ? v1 : v0) + simd_shuffle_xor(is_odd ? v0 : v1, ushort(1));
  return sum + simd_shuffle_xor(sum, ushort(2));
}

// Unsigned, since places without a token have any sums: they may overflow, and are never written.
template <class F>
inline int less_zeros(int sum, int of_activations) {
  return int(uint(sum) - uint(F::kZero) * uint(of_activations));
}

// Adds what one block adds to the output of one row and token. low, high: sums over 16 k each where F::kHalved, else
// low over 32.
template <class F>
inline float add_block(float total, int low, int high, device const uchar* chunk, int row, int block, float unit,
                       float scale, float scaled_sum, int2 half_sum) {
  const float d = load_d<F>(chunk, row, block, unit), m = load_m<F>(chunk, row, block);
  if (F::kHalved) {
    low = less_zeros<F>(low, half_sum.x);
    high = less_zeros<F>(high, half_sum.y);
    const float first = load_half_scale<F>(chunk, row, block, 0), second = load_half_scale<F>(chunk, row, block, 1);
    total = fma(fma(first, float(low), second * float(high)), d * scale, total);  // whole numbers below 2^24: exact
    if (F::kHasMin) {
      const float least0 = load_half_min<F>(chunk, row, block, 0), least1 = load_half_min<F>(chunk, row, block, 1);
      total = fma(m, fma(least0, float(half_sum.x), least1 * float(half_sum.y)) * scale, total);
    }
    return total;
  }
  low = less_zeros<F>(less_zeros<F>(low, half_sum.x), half_sum.y);
  total = fma(float(low), d * scale, total);
  return F::kHasMin ? fma(m, scaled_sum, total) : total;
}

// grid: [tiles of 16 rows / kSimdgroups, tiles of tokens].
template <class F, int kTokens>
kernel void quantized_linear(constant LinearArgs& args [[buffer(0)]],
                             device float* out [[buffer(1)]],
                             device const uchar* weight [[buffer(2)]],
                             device const uint2* q [[buffer(3)]],           // [T / 8, K / 32, 8 x 4]
                             device const float* scales [[buffer(4)]],      // [T / 8, K / 32, 8]
                             device const float* scaled_sums [[buffer(5)]],
                             device const int2* half_sums [[buffer(6)]],
                             device const float* bias [[buffer(7)]],
                             device const int* tile_expert [[buffer(8)]],
                             device const int* choices [[buffer(9)]],
                             uint2 group [[threadgroup_position_in_grid]],
                             uint lane [[thread_index_in_simdgroup]],
                             uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constant MatrixArgs& w = args.weight;
  const int row_tile = int(group.x) * kSimdgroups + int(simdgroup), token_tile = int(group.y);
  const int expert = args.has_experts ? tile_expert[token_tile] : 0;
  if (row_tile * kTileRows >= w.rows || expert < 0) return;
  device const uchar* tile = weight + expert * w.expert_bytes + row_tile * w.tile_bytes;
  const int g = int(lane) / 4, t = int(lane) % 4, blocks = w.cols / 32;
  float total[2][2] = {};  // [rows g, g + 8][tokens t, t + 4]; of one token, [0][0] is row g + 8 (t % 2)
  uint low[8] = {}, high[2] = {}, a[4];
  for (int block = 0; block < blocks; ++block) {
    if (block % 2 == 0) load_codes<F>(tile, w, block / 2, int(lane), low, high);
    unpack_codes<F>(low, high, block % 2, w, a);
    device const uchar* chunk = tile + w.scales + block / kChunkBlocks * F::kChunkBytes;
    const long at = long(token_tile) * blocks + block;
    const int in_chunk = block % kChunkBlocks;
    if (kTokens == 1) {
      const uint2 x = q[at * 32 + t];
      int first[2], second[2];
      for (int i = 0; i < 2; ++i) {
        first[i] = dot4<F>(a[i], x.x);
        second[i] = dot4<F>(a[2 + i], x.y);
        if (!F::kHalved) first[i] += second[i];
      }
      const int sum = sum_two(first[0], first[1], t), upper = F::kHalved ? sum_two(second[0], second[1], t) : 0;
      total[0][0] = add_block<F>(total[0][0], sum, upper, chunk, g + 8 * (t % 2), in_chunk, w.unit, scales[at * 8],
                                 scaled_sums[at * 8], half_sums[at * 8]);
      continue;
    }
    for (int j = 0; j < 2; ++j) {
      int first[2][4], second[2][4];
      for (int n = 0; n < 4; ++n) {
        const uint2 x = q[at * 32 + (4 * j + n) * 4 + t];
        for (int i = 0; i < 2; ++i) {
          first[i][n] = dot4<F>(a[i], x.x);
          second[i][n] = dot4<F>(a[2 + i], x.y);
          if (!F::kHalved) first[i][n] += second[i][n];
        }
      }
      const long token = at * 8 + 4 * j + t;
      for (int i = 0; i < 2; ++i) {
        const int sum = sum_four(first[i][0], first[i][1], first[i][2], first[i][3], t);
        const int upper = F::kHalved ? sum_four(second[i][0], second[i][1], second[i][2], second[i][3], t) : 0;
        total[i][j] = add_block<F>(total[i][j], sum, upper, chunk, g + 8 * i, in_chunk, w.unit, scales[token],
                                   scaled_sums[token], half_sums[token]);
      }
    }
  }
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j) {
      if (kTokens == 1 && (i != 0 || j != 0 || t >= 2)) continue;
      const int row = row_tile * kTileRows + g + 8 * (kTokens == 1 ? t : i);
      const int place = token_tile * 8 + (kTokens == 1 ? 0 : 4 * j + t);
      const int token = args.has_experts ? choices[place] : place;
      if (row >= w.rows || token < 0 || token >= args.tokens) continue;
      const float y = total[i][j];
      out[long(token) * args.out_stride + row] = args.has_bias ? y + bias[expert * w.rows + row] : y;
    }
}

typedef decltype(quantized_linear<FormatQ4_0, 1>) quantized_linear_t;
template [[host_name("quantized_linear_q4_0_1")]] kernel quantized_linear_t quantized_linear<FormatQ4_0, 1>;
template [[host_name("quantized_linear_q4_1_1")]] kernel quantized_linear_t quantized_linear<FormatQ4_1, 1>;
template [[host_name("quantized_linear_q5_0_1")]] kernel quantized_linear_t quantized_linear<FormatQ5_0, 1>;
template [[host_name("quantized_linear_q5_1_1")]] kernel quantized_linear_t quantized_linear<FormatQ5_1, 1>;
template [[host_name("quantized_linear_q8_0_1")]] kernel quantized_linear_t quantized_linear<FormatQ8_0, 1>;
template [[host_name("quantized_linear_q2_k_1")]] kernel quantized_linear_t quantized_linear<FormatQ2_K, 1>;
template [[host_name("quantized_linear_q3_k_1")]] kernel quantized_linear_t quantized_linear<FormatQ3_K, 1>;
template [[host_name("quantized_linear_q4_k_1")]] kernel quantized_linear_t quantized_linear<FormatQ4_K, 1>;
template [[host_name("quantized_linear_q5_k_1")]] kernel quantized_linear_t quantized_linear<FormatQ5_K, 1>;
template [[host_name("quantized_linear_q6_k_1")]] kernel quantized_linear_t quantized_linear<FormatQ6_K, 1>;
template [[host_name("quantized_linear_tq_1")]] kernel quantized_linear_t quantized_linear<FormatTQ, 1>;
template [[host_name("quantized_linear_iq_1")]] kernel quantized_linear_t quantized_linear<FormatIQ, 1>;
template [[host_name("quantized_linear_iq16_1")]] kernel quantized_linear_t quantized_linear<FormatIQ16, 1>;
template [[host_name("quantized_linear_iq4_nl_1")]] kernel quantized_linear_t quantized_linear<FormatIQ4_NL, 1>;
template [[host_name("quantized_linear_mxfp4_1")]] kernel quantized_linear_t quantized_linear<FormatMXFP4, 1>;
template [[host_name("quantized_linear_q4_0_8")]] kernel quantized_linear_t quantized_linear<FormatQ4_0, 8>;
template [[host_name("quantized_linear_q4_1_8")]] kernel quantized_linear_t quantized_linear<FormatQ4_1, 8>;
template [[host_name("quantized_linear_q5_0_8")]] kernel quantized_linear_t quantized_linear<FormatQ5_0, 8>;
template [[host_name("quantized_linear_q5_1_8")]] kernel quantized_linear_t quantized_linear<FormatQ5_1, 8>;
template [[host_name("quantized_linear_q8_0_8")]] kernel quantized_linear_t quantized_linear<FormatQ8_0, 8>;
template [[host_name("quantized_linear_q2_k_8")]] kernel quantized_linear_t quantized_linear<FormatQ2_K, 8>;
template [[host_name("quantized_linear_q3_k_8")]] kernel quantized_linear_t quantized_linear<FormatQ3_K, 8>;
template [[host_name("quantized_linear_q4_k_8")]] kernel quantized_linear_t quantized_linear<FormatQ4_K, 8>;
template [[host_name("quantized_linear_q5_k_8")]] kernel quantized_linear_t quantized_linear<FormatQ5_K, 8>;
template [[host_name("quantized_linear_q6_k_8")]] kernel quantized_linear_t quantized_linear<FormatQ6_K, 8>;
template [[host_name("quantized_linear_tq_8")]] kernel quantized_linear_t quantized_linear<FormatTQ, 8>;
template [[host_name("quantized_linear_iq_8")]] kernel quantized_linear_t quantized_linear<FormatIQ, 8>;
template [[host_name("quantized_linear_iq16_8")]] kernel quantized_linear_t quantized_linear<FormatIQ16, 8>;
template [[host_name("quantized_linear_iq4_nl_8")]] kernel quantized_linear_t quantized_linear<FormatIQ4_NL, 8>;
template [[host_name("quantized_linear_mxfp4_8")]] kernel quantized_linear_t quantized_linear<FormatMXFP4, 8>;
