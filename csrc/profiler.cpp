#include "profiler.h"

#include <algorithm>

namespace rvllm {

std::vector<ProfileRow> ProfiledBackend::rows() const {
  std::vector<ProfileRow> rows;
  for (const auto& [name, row] : rows_) {
    rows.push_back(row);
    rows.back().name = name;
  }
  std::sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.seconds > b.seconds; });
  return rows;
}

void ProfiledBackend::begin_step(const Batch& batch) {
  batch_ = &batch;
  backend_->begin_step(batch);
}

void ProfiledBackend::upload(float* dst, const float* src, int64_t count) {
  time("upload", 4.0 * double(count), 0, [&] { backend_->upload(dst, src, count); });
}

void ProfiledBackend::download(float* dst, const float* src, int64_t count) {
  time("download", 4.0 * double(count), 0, [&] { backend_->download(dst, src, count); });
}

void ProfiledBackend::embedding(Tensor out, const Weight& table, float scale) {
  const double bytes = double(table.bytes) / double(table.rows) * double(out.rows);
  time("embedding", bytes, 0, [&] { backend_->embedding(out, table, scale); });
}

void ProfiledBackend::rms_norm(Tensor out, Tensor x, const Weight& weight, float eps) {
  time("rms_norm", 0, 0, [&] { backend_->rms_norm(out, x, weight, eps); });
}

void ProfiledBackend::linear(Tensor out, Tensor x, const Weight& weight) {
  const double macs = double(x.rows) * double(weight.rows) * double(weight.cols);
  time("linear " + weight.name, double(weight.bytes), macs, [&] { backend_->linear(out, x, weight); });
}

void ProfiledBackend::rope(Tensor x, int head_dim, Tensor cos_sin, bool interleaved) {
  time("rope", 0, 0, [&] { backend_->rope(x, head_dim, cos_sin, interleaved); });
}

void ProfiledBackend::store_kv(KVCache& cache, int layer, Tensor k, Tensor v) {
  time("store_kv", 4.0 * double(k.rows * k.cols), 0, [&] { backend_->store_kv(cache, layer, k, v); });
}

void ProfiledBackend::paged_attention(Tensor out, Tensor q, const KVCache& cache, int layer,
                                      const AttentionParams& params) {
  double bytes = 0, macs = 0;
  for (int r = 0; r < batch_->num_requests; ++r) {
    const double context = batch_->context_lens[r];
    const double visible = params.window > 0 ? std::min<double>(context, params.window) : context;
    const double queries = batch_->query_start_loc[r + 1] - batch_->query_start_loc[r];
    bytes += visible * params.num_kv_heads * params.head_dim * 4.0;
    macs += queries * visible * params.num_heads * params.head_dim * 2.0;
  }
  time("paged_attention", bytes, macs, [&] { backend_->paged_attention(out, q, cache, layer, params); });
}

void ProfiledBackend::gated_activation(Tensor out, Tensor gate_up, Gate gate) {
  time("gated_activation", 0, 0, [&] { backend_->gated_activation(out, gate_up, gate); });
}

void ProfiledBackend::add(Tensor x, Tensor y) {
  time("add", 0, 0, [&] { backend_->add(x, y); });
}

void ProfiledBackend::gather_rows(Tensor out, Tensor x) {
  time("gather_rows", 0, 0, [&] { backend_->gather_rows(out, x); });
}

}  // namespace rvllm
