// One thread an element; grid: [rows, columns / 256].
#include "metal/device_math.h"

kernel void add(constant RowArgs& args [[buffer(0)]],
                device float* x [[buffer(1)]],
                device const float* y [[buffer(2)]],
                uint2 group [[threadgroup_position_in_grid]],
                uint thread_index [[thread_index_in_threadgroup]]) {
  const int i = int(group.y * 256 + thread_index);
  if (i < args.cols) x[long(group.x) * args.x_stride + i] += args.scale * y[long(group.x) * args.y_stride + i];
}

kernel void add_gated(constant RowArgs& args [[buffer(0)]],
                      device float* x [[buffer(1)]],
                      device const float* y [[buffer(2)]],
                      device const float* gate [[buffer(3)]],
                      uint2 group [[threadgroup_position_in_grid]],
                      uint thread_index [[thread_index_in_threadgroup]]) {
  const int i = int(group.y * 256 + thread_index);
  const float scale = 1.0f / (1.0f + ordered_exp(-gate[long(group.x) * args.z_stride]));
  if (i < args.cols) x[long(group.x) * args.x_stride + i] += scale * y[long(group.x) * args.y_stride + i];
}

kernel void scale_logits(constant RowArgs& args [[buffer(0)]],
                         device float* x [[buffer(1)]],
                         uint2 group [[threadgroup_position_in_grid]],
                         uint thread_index [[thread_index_in_threadgroup]]) {
  const int i = int(group.y * 256 + thread_index);
  if (i >= args.cols) return;
  device float& value = x[long(group.x) * args.x_stride + i];
  value = value * args.scale;
  if (args.soft_cap != 0.0f) value = soft_capped(value, args.soft_cap);
}

kernel void gather_rows(constant RowArgs& args [[buffer(0)]],
                        device float* out [[buffer(1)]],
                        device const float* x [[buffer(2)]],
                        device const int* rows [[buffer(3)]],
                        uint2 group [[threadgroup_position_in_grid]],
                        uint thread_index [[thread_index_in_threadgroup]]) {
  const int i = int(group.y * 256 + thread_index);
  if (i < args.cols) out[long(group.x) * args.y_stride + i] = x[long(rows[group.x]) * args.x_stride + i];
}
