#include "metal/device_math.h"

// Rows of x as int8 in blocks of 32 k: a simdgroup makes a block, lane k element k. grid: [rows, blocks / 8]. Tokens go
// in tiles of 8, in the order in which quantized_linear takes them.
kernel void quantize(constant QuantizeArgs& args [[buffer(0)]],
                     device uchar* codes [[buffer(1)]],          // [T / 8, K / 32, 8 x 4] of 8 bytes
                     device float* scales [[buffer(2)]],         // [T / 8, K / 32, 8]
                     device float* scaled_sums [[buffer(3)]],
                     device int2* half_sums [[buffer(4)]],
                     device const float* x [[buffer(5)]],
                     device const int* places [[buffer(6)]],
                     uint2 group [[threadgroup_position_in_grid]],
                     uint lane_index [[thread_index_in_simdgroup]],
                     uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const int row = int(group.x), block = int(group.y) * 8 + int(simdgroup), blocks = args.cols / 32,
            lane = int(lane_index);
  if (block >= blocks) return;
  const int token = args.has_places ? places[row] : row;
  const float value = x[long(row / args.per_source) * args.x_stride + 32 * block + lane];
  // As integers, magnitudes are in order and NaN is above all.
  const float largest = as_type<float>(simd_max(as_type<int>(value) & 0x7fffffff));
  const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;  // never infinite
  const float rounded = rint(value * inverse);
  const float raised = rounded > -127.0f ? rounded : -127.0f;  // NaN has no integer: the scale passes it on
  const int code = int(raised < 127.0f ? raised : 127.0f);
  const int low = simd_sum(lane < 16 ? code : 0), high = simd_sum(lane < 16 ? 0 : code);
  const long at = long(token / 8) * blocks + block;
  codes[(at * 32 + token % 8 * 4 + lane % 16 / 4) * 8 + lane / 16 * 4 + lane % 4] = uchar(code);
  if (lane == 0) {
    const float scale = largest <= 3.40282347e38f ? largest / 127.0f : not_a_number();
    scales[at * 8 + token % 8] = scale;
    scaled_sums[at * 8 + token % 8] = scale * float(low + high);
    half_sums[at * 8 + token % 8] = int2(low, high);
  }
}
