#include "metal/device_math.h"

enum ActivationKind : int { kSiluGated, kGeluGated, kSwigluOai, kGelu, kReluSqr };  // Activation of activation.h

inline float times_logistic(float x, float z) { return x / (1.0f + ordered_exp(0.0f - z)); }

inline float gelu(float x) { return times_logistic(x, 1.5957691216057308f * fma(x * x * x, 0.044715f, x)); }

// grid: [T, columns / 256]; a thread makes one element. Gated kinds have gates, then ups, in a row of x.
template <int kKind>
kernel void activation(constant RowArgs& args [[buffer(0)]],
                       device float* out [[buffer(1)]],
                       device const float* x [[buffer(2)]],
                       uint2 group [[threadgroup_position_in_grid]],
                       uint thread_index [[thread_index_in_threadgroup]]) {
  const int i = int(group.y * 256 + thread_index);
  if (i >= args.cols) return;
  device const float* row = x + long(group.x) * args.x_stride;
  const float gate = row[i];
  float y = gelu(gate);
  if (kKind == kSiluGated) y = times_logistic(gate, gate) * row[args.cols + i];
  if (kKind == kGeluGated) y = y * row[args.cols + i];
  if (kKind == kSwigluOai) {  // bounds come first, so that NaN gets through
    const float up = row[args.cols + i];
    const float least = 7.0f < gate ? 7.0f : gate, bounded = 7.0f < up ? 7.0f : up;
    y = times_logistic(least, 1.702f * least) * ((-7.0f > bounded ? -7.0f : bounded) + 1.0f);
  }
  if (kKind == kReluSqr) y = 0.0f > gate ? 0.0f : gate * gate;
  out[long(group.x) * args.y_stride + i] = y;
}

typedef decltype(activation<kGelu>) activation_t;
template [[host_name("activation_silu_gated")]] kernel activation_t activation<kSiluGated>;
template [[host_name("activation_gelu_gated")]] kernel activation_t activation<kGeluGated>;
template [[host_name("activation_swiglu_oai")]] kernel activation_t activation<kSwigluOai>;
template [[host_name("activation_gelu")]] kernel activation_t activation<kGelu>;
template [[host_name("activation_relu_sqr")]] kernel activation_t activation<kReluSqr>;
