#include "metal/unpack.h"

// One thread an element of a token's row; grid: [T, columns / 256].
template <class F>
kernel void embedding(constant EmbeddingArgs& args [[buffer(0)]],
                      device float* out [[buffer(1)]],
                      device const uchar* table [[buffer(2)]],
                      device const int* ids [[buffer(3)]],
                      uint2 group [[threadgroup_position_in_grid]],
                      uint thread_index [[thread_index_in_threadgroup]]) {
  const int k = int(group.y * 256 + thread_index), token = int(group.x);
  if (k >= args.table.cols) return;
  const float w = weight_at<F>(table, args.table, ids[token], k);
  out[long(token) * args.out_stride + k] = args.scale == 1.0f ? w : w * args.scale;
}

typedef decltype(embedding<FormatQ4_0>) embedding_t;
template [[host_name("embedding_q4_0")]] kernel embedding_t embedding<FormatQ4_0>;
template [[host_name("embedding_q4_1")]] kernel embedding_t embedding<FormatQ4_1>;
template [[host_name("embedding_q5_0")]] kernel embedding_t embedding<FormatQ5_0>;
template [[host_name("embedding_q5_1")]] kernel embedding_t embedding<FormatQ5_1>;
template [[host_name("embedding_q8_0")]] kernel embedding_t embedding<FormatQ8_0>;
template [[host_name("embedding_q2_k")]] kernel embedding_t embedding<FormatQ2_K>;
template [[host_name("embedding_q3_k")]] kernel embedding_t embedding<FormatQ3_K>;
template [[host_name("embedding_q4_k")]] kernel embedding_t embedding<FormatQ4_K>;
template [[host_name("embedding_q5_k")]] kernel embedding_t embedding<FormatQ5_K>;
template [[host_name("embedding_q6_k")]] kernel embedding_t embedding<FormatQ6_K>;
template [[host_name("embedding_tq")]] kernel embedding_t embedding<FormatTQ>;
template [[host_name("embedding_iq")]] kernel embedding_t embedding<FormatIQ>;
template [[host_name("embedding_iq16")]] kernel embedding_t embedding<FormatIQ16>;
template [[host_name("embedding_iq4_nl")]] kernel embedding_t embedding<FormatIQ4_NL>;
template [[host_name("embedding_mxfp4")]] kernel embedding_t embedding<FormatMXFP4>;
template [[host_name("embedding_f32")]] kernel embedding_t embedding<FloatF32>;
template [[host_name("embedding_f16")]] kernel embedding_t embedding<FloatF16>;
template [[host_name("embedding_bf16")]] kernel embedding_t embedding<FloatBF16>;
