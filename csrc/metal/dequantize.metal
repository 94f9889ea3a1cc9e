// What MPSMatrixMultiplication takes and gives.
#include "metal/unpack.h"

// One thread a weight; grid: [rows, columns / 256].
template <class F>
kernel void dequantize(constant MatrixArgs& args [[buffer(0)]],
                       device half* out [[buffer(1)]],
                       device const uchar* weight [[buffer(2)]],
                       uint2 group [[threadgroup_position_in_grid]],
                       uint thread_index [[thread_index_in_threadgroup]]) {
  const int k = int(group.y * 256 + thread_index), row = int(group.x);
  if (k < args.cols) out[long(row) * args.cols + k] = half(weight_at<F>(weight, args, row, k));
}

typedef decltype(dequantize<FormatQ4_0>) dequantize_t;
template [[host_name("dequantize_q4_0")]] kernel dequantize_t dequantize<FormatQ4_0>;
template [[host_name("dequantize_q4_1")]] kernel dequantize_t dequantize<FormatQ4_1>;
template [[host_name("dequantize_q5_0")]] kernel dequantize_t dequantize<FormatQ5_0>;
template [[host_name("dequantize_q5_1")]] kernel dequantize_t dequantize<FormatQ5_1>;
template [[host_name("dequantize_q8_0")]] kernel dequantize_t dequantize<FormatQ8_0>;
template [[host_name("dequantize_q2_k")]] kernel dequantize_t dequantize<FormatQ2_K>;
template [[host_name("dequantize_q3_k")]] kernel dequantize_t dequantize<FormatQ3_K>;
template [[host_name("dequantize_q4_k")]] kernel dequantize_t dequantize<FormatQ4_K>;
template [[host_name("dequantize_q5_k")]] kernel dequantize_t dequantize<FormatQ5_K>;
template [[host_name("dequantize_q6_k")]] kernel dequantize_t dequantize<FormatQ6_K>;
template [[host_name("dequantize_tq")]] kernel dequantize_t dequantize<FormatTQ>;
template [[host_name("dequantize_iq")]] kernel dequantize_t dequantize<FormatIQ>;
template [[host_name("dequantize_iq16")]] kernel dequantize_t dequantize<FormatIQ16>;
template [[host_name("dequantize_iq4_nl")]] kernel dequantize_t dequantize<FormatIQ4_NL>;
template [[host_name("dequantize_mxfp4")]] kernel dequantize_t dequantize<FormatMXFP4>;

// Rows of x lie x_stride apart, those of out are dense.
kernel void convert(constant RowArgs& args [[buffer(0)]],
                    device half* out [[buffer(1)]],
                    device const float* x [[buffer(2)]],
                    uint2 group [[threadgroup_position_in_grid]],
                    uint thread_index [[thread_index_in_threadgroup]]) {
  const int k = int(group.y * 256 + thread_index), row = int(group.x);
  if (k < args.cols) out[long(row) * args.cols + k] = half(x[long(row) * args.x_stride + k]);
}

kernel void add_bias(constant RowArgs& args [[buffer(0)]],
                     device float* out [[buffer(1)]],
                     device const float* bias [[buffer(2)]],
                     uint2 group [[threadgroup_position_in_grid]],
                     uint thread_index [[thread_index_in_threadgroup]]) {
  const int k = int(group.y * 256 + thread_index), row = int(group.x);
  if (k < args.cols) out[long(row) * args.x_stride + k] += bias[k];
}
