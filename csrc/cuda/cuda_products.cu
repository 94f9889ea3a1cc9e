// The products of the backend: rows are made, then each matrix of the weight takes its kernel or cuBLAS.
#include "check.h"
#include "cuda/cuda_backend.h"
#include "cuda/cuda_weights.h"
#include "cuda/operations.h"
#include "cuda/rows.h"

namespace rvllm::cuda {

CudaBackend::Rows CudaBackend::Rows::plain(Tensor x) {
  Rows rows;
  rows.x = x;
  rows.count = x.rows;
  rows.cols = x.cols;
  return rows;
}

CudaBackend::Rows CudaBackend::Rows::activated(Tensor x, Activation activation) {
  Rows rows = plain(x);
  rows.kind = kActivated;
  rows.activation = activation;
  if (is_gated(activation)) rows.cols /= 2;
  return rows;
}

void CudaBackend::linear(Tensor out, Tensor x, const Weight& weight) { multiply(out, Rows::plain(x), weight); }

void CudaBackend::norm_linear(Tensor out, Tensor x, const Norm& norm, const Weight& weight) {
  Rows rows = Rows::plain(x);
  rows.kind = Rows::kNorm;
  rows.norm = norm;
  multiply(out, rows, weight);
}

void CudaBackend::activated_linear(Tensor out, Tensor x, Activation activation, const Weight& weight) {
  multiply(out, Rows::activated(x, activation), weight);
}

bool CudaBackend::may_use_blas(const DeviceMatrix& w) const {
  return w.format >= 0 ? options_.f16_prefill : w.type != GgmlType::F32;
}

bool CudaBackend::uses_blas(const DeviceMatrix& w, const Rows& rows) const {
  const int others = w.format >= 0 ? kQuantizedTokens : kMatvecTokens;
  return !rows.experts && rows.count > others && may_use_blas(w);
}

Blas& CudaBackend::blas() {
  if (!blas_) blas_ = std::make_unique<Blas>(stream_, options_.cublas);
  return *blas_;
}

// Reserves memory now, multiplies when the work's turn comes.
void CudaBackend::multiply(Tensor out, const Rows& rows, const Weight& weight) {
  const auto& w = static_cast<const CudaWeight&>(weight);
  const int64_t places = rows.experts ? 8 * int64_t(rows.experts->num_tiles) : rows.count;
  if (w.has_quantized) reserve(quantized_, QuantizedRows::bytes(places, rows.cols), "quantized activations");
  if (rows.kind != Rows::kPlain) reserve(hidden_, rows.count * rows.cols * int64_t(sizeof(float)), "activations");
  for (const DeviceMatrix& m : w.parts) {
    if (!uses_blas(m, rows)) continue;
    blas();
    reserve(blas_input_, rows.count * rows.cols * 2, "activations for cuBLAS");
    if (m.format >= 0) reserve(blas_weight_, m.rows * m.cols * 2, "dequantized weights");
  }
  const Weight* const device_weight = &weight;
  const void* const norm_weight = rows.norm.weight;
  const auto residual = std::make_shared<Residual>();
  enqueue(with(signature(kLinear, out, rows.x), device_weight, norm_weight, int(rows.kind), int(rows.activation),
               rows.norm.eps, rows.per_source, rows.experts ? rows.experts->num_choices : 0),
          [=] { multiply_now(out, rows, *device_weight, *residual); });
  open_ = {};
  if (rows.experts) return;
  open_.num_noted = graphs_.num_noted();
  open_.out = out;
  open_.residual = residual;
}

void CudaBackend::multiply_now(Tensor out, const Rows& rows, const Weight& weight, const Residual& residual) {
  const auto& w = static_cast<const CudaWeight&>(weight);
  const ExpertRows experts = rows.experts ? *rows.experts : ExpertRows{};
  const int64_t places = rows.experts ? 8 * int64_t(experts.num_tiles) : rows.count;
  const int k = int(rows.cols), count = int(rows.count);
  bool needs_int8 = false, needs_floats = false;
  for (const DeviceMatrix& m : w.parts) (m.format >= 0 && !uses_blas(m, rows) ? needs_int8 : needs_floats) = true;

  const QuantizedRows int8 = QuantizedRows::at(quantized_.as(), places, k);
  Tensor floats = rows.x;
  if (rows.kind != Rows::kPlain) floats = Tensor(hidden_.as<float>(), count, k);
  if (rows.kind == Rows::kNorm) {
    const NormRow row = norm_row(rows.x, rows.norm);
    if (needs_int8) quantize_norm(row, int8, count, k, stream_);
    if (needs_floats) cuda::norm(floats, rows.x, row, k, false, stream_);
  } else if (rows.kind == Rows::kActivated) {
    if (needs_int8) quantize_activated(rows.x, rows.activation, int8, k, experts.places, stream_);
    if (needs_floats) activate(floats, rows.x, rows.activation, stream_);
  } else if (needs_int8) {
    quantize(rows.x, count, rows.per_source, int8, experts.places, stream_);
  }

  int64_t bias_at = 0;
  for (const DeviceMatrix& m : w.parts) {
    const float* const bias = w.bias() ? w.bias() + bias_at : nullptr;
    bias_at += m.rows * w.num_experts;
    const Tensor columns = out.columns(m.first_row, m.rows);
    Residual here = residual;
    if (here.rows) here.rows += m.first_row;
    if (uses_blas(m, rows))
      multiply_by_blas(columns, floats, m, bias);
    else if (m.format >= 0)
      quantized_linear(m, int8, count, experts, bias, columns.data, out.stride, here, num_processors_, stream_);
    else
      matvec(columns, floats, m, bias, experts, rows.per_source, stream_);
    if (here.rows && (m.format < 0 || uses_blas(m, rows))) {
      Tensor sum = columns;
      sum.data = here.rows;
      sum.stride = here.stride;
      cuda::add(sum, columns, here.scale, stream_);
    }
  }
}

void CudaBackend::multiply_by_blas(Tensor out, Tensor x, const DeviceMatrix& w, const float* bias) {
  const GgmlType type = w.format >= 0 ? GgmlType::F16 : w.type;
  const void* weight = w.data;
  if (w.format >= 0) {
    dequantize(blas_weight_.as(), w, stream_);
    weight = blas_weight_.as();
  }
  convert(blas_input_.as(), x, type, stream_);
  blas().matmul(out.data, out.stride, blas_input_.as(), weight,
                type == GgmlType::F16 ? BlasType::kF16 : BlasType::kBF16, out.rows, out.cols, x.cols);
  if (bias) add_bias(out, bias, stream_);
}

void CudaBackend::route(Tensor logits, const RouterParams& params) {
  check(logits.cols <= kMaxExperts, "[route] ", logits.cols, " experts, CUDA has at most ", kMaxExperts);
  ExpertRows& e = experts_;
  e.num_used = params.num_used;
  e.num_choices = int(logits.rows) * params.num_used;
  e.num_tiles = (e.num_choices + 7 * std::min(e.num_choices, int(logits.cols)) + 7) / 8;
  const int64_t words = 3 * int64_t(e.num_choices) + 9 * int64_t(e.num_tiles);
  reserve(expert_memory_, words * 4, "choices of experts");
  e.experts = expert_memory_.as<int>();
  e.weights = reinterpret_cast<float*>(e.experts + e.num_choices);
  e.places = e.experts + 2 * e.num_choices;
  e.choices = e.places + e.num_choices;
  e.tile_expert = e.choices + 8 * e.num_tiles;
  const ExpertRows rows = e;
  const float* const bias = params.bias ? static_cast<const CudaVector*>(params.bias)->values() : nullptr;
  enqueue(with(signature(kRoute, logits), e.experts, params.num_used, params.normalized, params.sigmoid, params.scale,
               bias),
          [=] { cuda::route(logits, params, bias, rows, stream_); });
}

void CudaBackend::expert_linear(Tensor out, Tensor x, const Weight& experts) {
  Rows rows = Rows::plain(x);
  rows.count = out.rows;
  rows.experts = &experts_;
  rows.per_source = experts_.num_used;
  multiply(out, rows, experts);
}

void CudaBackend::activated_expert_linear(Tensor out, Tensor x, Activation activation, const Weight& experts) {
  Rows rows = Rows::activated(x, activation);
  rows.experts = &experts_;
  multiply(out, rows, experts);
}

void CudaBackend::combine(Tensor out, Tensor y) {
  const ExpertRows rows = experts_;
  enqueue(with(signature(kCombine, out, y), rows.weights, rows.num_used),
          [=] { cuda::combine(out, y, rows, stream_); });
}

}  // namespace rvllm::cuda
