#include "metal/device_math.h"

// The better of two candidates; of equal values the one of the lower column.
inline bool is_better(float value, int column, float than, int than_column) {
  return value > than || (value == than && column < than_column);
}

// A group finds the column of a row's largest element, or -1 where one is no finite number. grid: [rows]; 256 threads.
kernel void argmax(constant RowArgs& args [[buffer(0)]],
                   device int* out [[buffer(1)]],
                   device const uint* x [[buffer(2)]],  // floats; even under fast math their bits show NaN
                   uint row [[threadgroup_position_in_grid]],
                   uint thread_index [[thread_index_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float values[8];
  threadgroup int columns[8];
  threadgroup int finite[8];
  x += long(row) * args.x_stride;
  float best = -3.40282347e38f;
  int column = args.cols, is_finite = 1;
  for (int i = int(thread_index); i < args.cols; i += 256) {
    const float value = as_type<float>(x[i]);
    if ((x[i] & 0x7f800000) == 0x7f800000) is_finite = 0;
    if (is_better(value, i, best, column)) {
      best = value;
      column = i;
    }
  }
  for (ushort span = 16; span > 0; span /= 2) {
    const float value = simd_shuffle_xor(best, span);
    const int other = simd_shuffle_xor(column, span);
    if (is_better(value, other, best, column)) {
      best = value;
      column = other;
    }
  }
  is_finite = simd_min(is_finite);
  if (lane == 0) {
    values[simdgroup] = best;
    columns[simdgroup] = column;
    finite[simdgroup] = is_finite;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index != 0) return;
  for (int i = 1; i < 8; ++i) {
    is_finite = min(is_finite, finite[i]);
    if (is_better(values[i], columns[i], best, column)) {
      best = values[i];
      column = columns[i];
    }
  }
  out[row] = is_finite == 1 ? column : -1;
}
