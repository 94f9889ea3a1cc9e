#include <algorithm>
#include <cstring>

#include "cpu/cpu_backend.h"
#include "cpu/cpu_weight.h"

namespace rvllm {

void CpuBackend::route(Tensor logits, const RouterParams& params) {
  experts_.resize(logits.rows, params.num_used);
  const float* const bias = params.bias ? static_cast<const CpuVector*>(params.bias)->values.data() : nullptr;
  for_rows(logits.rows, [&](int64_t t, int) {
    kernels_.route({logits.row(t), bias, int(logits.cols), params.num_used, params.normalized, kLeastScores,
                    params.sigmoid, params.scale, experts_.experts.data() + t * params.num_used,
                    experts_.weights.data() + t * params.num_used});
  });
  experts_.sort(int(logits.cols));
}

void CpuBackend::expert_linear(Tensor out, Tensor x, const Weight& experts) {
  const Tensor h = linear_input(out.rows, x.cols);
  multiply(out, h, experts, experts_.groups, [&](int64_t row) {
    std::memcpy(h.row(row), x.row(experts_.tokens[size_t(row)]), size_t(x.cols) * sizeof(float));
  });
}

void CpuBackend::activated_expert_linear(Tensor out, Tensor x, Activation activation, const Weight& experts) {
  multiply_activated(out, x, activation, experts, experts_.groups);
}

void CpuBackend::combine(Tensor out, Tensor y) {
  const int k = experts_.num_used;
  for_rows(out.rows, [&](int64_t t, int) {
    std::fill_n(out.row(t), out.cols, 0.0f);
    for (int64_t i = t * k; i < (t + 1) * k; ++i)
      kernels_.add(out.row(t), y.row(experts_.rows[size_t(i)]), experts_.weights[size_t(i)], int(out.cols));
  });
}

void CpuBackend::add_gated(Tensor x, Tensor y, Tensor gate) {
  for_rows(x.rows, [&](int64_t t, int) {
    kernels_.add(x.row(t), y.row(t), kernels_.sigmoid(*gate.row(t)), int(x.cols));
  });
}

}  // namespace rvllm
