// What stands for an operation in the signature of a step.
#pragma once

#include "cuda/step_graphs.h"
#include "tensor.h"

namespace rvllm::cuda {

enum Op : int {
  kEmbedding, kNorm, kLinear, kRope, kStoreKv, kAttention, kRoute, kCombine, kAdd, kAddGated, kGatherRows, kArgmax,
  kScaleLogits
};

inline Signature signature(Op op, Tensor a, Tensor b = {}) {
  return Signature(int(op), a.data, a.rows, a.cols, a.stride, b.data, b.rows, b.cols, b.stride);
}

template <class... Values>
Signature with(Signature s, const Values&... values) {
  (s.add(values), ...);
  return s;
}

}  // namespace rvllm::cuda
