#include "profiler.h"

#include <algorithm>

namespace rvllm {
namespace {

enum Operation : size_t {
  kSampling, kUpload, kDownload, kEmbedding, kNorm, kRope, kStoreKv, kPagedAttention, kAdd,
  kRoute, kCombine, kAddGated, kGatherRows, kArgmax, kScaleLogits, kFirstLinear,
};
constexpr const char* kNames[kFirstLinear] = {
    "sampling", "upload", "download", "embedding", "norm", "rope", "store_kv", "paged_attention",
    "add", "route", "combine", "add_gated", "gather_rows", "argmax", "scale_logits",
};

// Of the experts that so many rows use, at most.
double expert_bytes(const Weight& experts, int64_t rows) {
  return double(experts.bytes) / experts.num_experts * double(std::min<int64_t>(rows, experts.num_experts));
}

}  // namespace

ProfiledBackend::ProfiledBackend(std::shared_ptr<Backend> backend)
    : backend_(std::move(backend)), recorder_(backend_->pool().record()) {
  for (const char* name : kNames) rows_.push_back({name});
}

std::vector<ProfileRow> ProfiledBackend::rows() const {
  std::vector<ProfileRow> rows = rows_;
  for (size_t i = 0; i < rows.size(); ++i) {
    const TimeLog::Total caller = recorder_.threads[0].total(i);
    rows[i].calls = caller.slices;
    rows[i].ns = caller.ns;
    rows[i].busy_ns.push_back(caller.ns - (i < recorder_.waiting.size() ? recorder_.waiting[i] : 0));
    for (size_t t = 1; t < recorder_.threads.size(); ++t) rows[i].busy_ns.push_back(recorder_.threads[t].total(i).ns);
  }
  return rows;
}

void ProfiledBackend::reset() {
  reset_totals();
  for (TimeLog& thread : recorder_.threads) thread.reset();
}

void ProfiledBackend::reset_totals() {
  for (ProfileRow& row : rows_) row = {row.name};
  for (TimeLog& thread : recorder_.threads) thread.reset_totals();
  recorder_.waiting.clear();
}

std::unique_ptr<KVCache> ProfiledBackend::alloc_kv_cache(const KVCacheSpec& spec) {
  kv_bytes_ = double(backend_->kv_cache_bytes(spec)) / spec.num_layers / spec.num_blocks / spec.block_size;
  return backend_->alloc_kv_cache(spec);
}

size_t ProfiledBackend::linear_row(const Weight& weight) {
  const auto at = std::find(linear_names_.begin(), linear_names_.end(), weight.name);
  const size_t row = kFirstLinear + size_t(at - linear_names_.begin());
  if (row == rows_.size()) {
    linear_names_.push_back(weight.name);
    rows_.push_back({"linear " + weight.name});
  }
  return row;
}

void ProfiledBackend::upload(float* dst, const float* src, int64_t count) {
  time(kUpload, 0, 0, [&] { backend_->upload(dst, src, count); });
}

float* ProfiledBackend::download(Tensor x) {
  float* data = nullptr;
  time(kDownload, 0, 0, [&] { data = backend_->download(x); });
  return data;
}

void ProfiledBackend::begin_step(const Batch& batch) {
  batch_ = &batch;
  backend_->begin_step(batch);
}

void ProfiledBackend::embedding(Tensor out, const Weight& table, float scale) {
  const double bytes = double(table.bytes) / double(table.rows) * double(out.rows);
  time(kEmbedding, bytes, 0, [&] { backend_->embedding(out, table, scale); });
}

void ProfiledBackend::norm(Tensor out, Tensor x, const Norm& norm) {
  time(kNorm, 0, 0, [&] { backend_->norm(out, x, norm); });
}

void ProfiledBackend::linear(Tensor out, Tensor x, const Weight& weight) {
  const double macs = double(x.rows) * double(weight.rows) * double(weight.cols);
  time(linear_row(weight), double(weight.bytes), macs, [&] { backend_->linear(out, x, weight); });
}

void ProfiledBackend::norm_linear(Tensor out, Tensor x, const Norm& norm, const Weight& weight) {
  const double macs = double(x.rows) * double(weight.rows) * double(weight.cols);
  time(linear_row(weight), double(weight.bytes), macs, [&] { backend_->norm_linear(out, x, norm, weight); });
}

void ProfiledBackend::activated_linear(Tensor out, Tensor x, Activation activation, const Weight& weight) {
  const double macs = double(out.rows) * double(weight.rows) * double(weight.cols);
  time(linear_row(weight), double(weight.bytes), macs, [&] { backend_->activated_linear(out, x, activation, weight); });
}

void ProfiledBackend::rope(Tensor x, int head_dim, Tensor cos_sin, bool interleaved) {
  time(kRope, 0, 0, [&] { backend_->rope(x, head_dim, cos_sin, interleaved); });
}

void ProfiledBackend::store_kv(KVCache& cache, int layer, Tensor k, Tensor v) {
  time(kStoreKv, kv_bytes_ * double(k.rows), 0, [&] { backend_->store_kv(cache, layer, k, v); });
}

void ProfiledBackend::paged_attention(Tensor out, Tensor q, const KVCache& cache, int layer,
                                      const AttentionParams& params) {
  const Batch& b = *batch_;
  double read = 0, seen = 0;  // positions: those of a request together, and of each token
  for (int r = 0; r < b.num_requests; ++r) {
    const int begin = b.query_start_loc[r], end = b.query_start_loc[r + 1];
    const int visible = params.window > 0 ? params.window : b.context_lens[r];
    read += std::min(b.context_lens[r], visible + end - begin - 1);
    for (int t = begin; t < end; ++t) seen += std::min(b.positions[t] + 1, visible);
  }
  time(kPagedAttention, read * kv_bytes_, seen * params.num_heads * params.head_dim * 2,
       [&] { backend_->paged_attention(out, q, cache, layer, params); });
}

void ProfiledBackend::route(Tensor logits, const RouterParams& params) {
  time(kRoute, 0, 0, [&] { backend_->route(logits, params); });
}

void ProfiledBackend::expert_linear(Tensor out, Tensor x, const Weight& experts) {
  const double macs = double(out.rows) * double(experts.rows) * double(experts.cols);
  time(linear_row(experts), expert_bytes(experts, out.rows), macs, [&] { backend_->expert_linear(out, x, experts); });
}

void ProfiledBackend::activated_expert_linear(Tensor out, Tensor x, Activation activation, const Weight& experts) {
  const double macs = double(out.rows) * double(experts.rows) * double(experts.cols);
  time(linear_row(experts), expert_bytes(experts, out.rows), macs,
       [&] { backend_->activated_expert_linear(out, x, activation, experts); });
}

void ProfiledBackend::combine(Tensor out, Tensor y) {
  time(kCombine, 0, 0, [&] { backend_->combine(out, y); });
}

void ProfiledBackend::add(Tensor x, Tensor y, float scale) {
  time(kAdd, 0, 0, [&] { backend_->add(x, y, scale); });
}

void ProfiledBackend::add_gated(Tensor x, Tensor y, Tensor gate) {
  time(kAddGated, 0, 0, [&] { backend_->add_gated(x, y, gate); });
}

void ProfiledBackend::gather_rows(Tensor out, Tensor x) {
  time(kGatherRows, 0, 0, [&] { backend_->gather_rows(out, x); });
}

const int32_t* ProfiledBackend::argmax(Tensor x) {
  const int32_t* best = nullptr;
  time(kArgmax, 0, 0, [&] { best = backend_->argmax(x); });
  return best;
}

void ProfiledBackend::scale_logits(Tensor x, float scale, float soft_cap) {
  time(kScaleLogits, 0, 0, [&] { backend_->scale_logits(x, scale, soft_cap); });
}

}  // namespace rvllm
