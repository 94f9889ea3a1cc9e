#include "metal/device_math.h"

constant bool is_interleaved [[function_constant(1)]];

// A thread rotates one pair of one head of one token. grid: [T, pairs of all heads / 128]. arXiv:2104.09864
kernel void rope(constant RopeArgs& args [[buffer(0)]],
                 device float* x [[buffer(1)]],
                 device const float* cos_sin [[buffer(2)]],  // [T, 2 * half_width]
                 uint2 group [[threadgroup_position_in_grid]],
                 uint thread_index [[thread_index_in_threadgroup]]) {
  const int index = int(group.y * 128 + thread_index), width = args.half_width;
  if (index >= args.heads * width) return;
  const int i = index % width;
  device float* head = x + long(group.x) * args.stride + index / width * args.head_dim;
  device float* first = head + (is_interleaved ? 2 * i : i);
  device float* second = first + (is_interleaved ? 1 : width);
  const float c = cos_sin[long(group.x) * 2 * width + i], s = cos_sin[long(group.x) * 2 * width + width + i];
  const float a = *first, b = *second;
  *first = a * c - b * s;
  *second = a * s + b * c;
}
