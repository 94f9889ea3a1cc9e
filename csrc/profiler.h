// Times every operation of a backend. It stands between the model and the backend, and only while profiling: switched
// off, nothing of it runs.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend.h"

namespace rvllm {

// Totals of one operation (for linear: of one kind of weight).
struct ProfileRow {
  std::string name;
  int64_t calls = 0;
  double seconds = 0;
  double bytes = 0;  // weights and KV cache read or written; activations stay in the caches
  double macs = 0;   // multiply-accumulates
};

class ProfiledBackend final : public Backend {
 public:
  explicit ProfiledBackend(std::shared_ptr<Backend> backend) : backend_(std::move(backend)) {}

  std::vector<ProfileRow> rows() const;  // slowest first
  void reset() { rows_.clear(); }

  std::string name() const override { return backend_->name(); }
  MemoryInfo memory_info() const override { return backend_->memory_info(); }
  ThreadPool& pool() override { return backend_->pool(); }
  std::shared_ptr<float> alloc(int64_t count) override { return backend_->alloc(count); }
  void synchronize() override { backend_->synchronize(); }
  void upload(float* dst, const float* src, int64_t count) override;
  void download(float* dst, const float* src, int64_t count) override;
  std::unique_ptr<Weight> load_weight(const std::vector<HostTensor>& parts,
                                      const std::vector<HostTensor>& biases) override {
    return backend_->load_weight(parts, biases);
  }
  std::unique_ptr<Weight> load_vector(const HostTensor& tensor) override { return backend_->load_vector(tensor); }
  std::unique_ptr<KVCache> alloc_kv_cache(const KVCacheSpec& spec) override { return backend_->alloc_kv_cache(spec); }
  size_t kv_cache_bytes(const KVCacheSpec& spec) const override { return backend_->kv_cache_bytes(spec); }

  void begin_step(const Batch& batch) override;
  void end_step() override { backend_->end_step(); }
  void embedding(Tensor out, const Weight& table, float scale) override;
  void rms_norm(Tensor out, Tensor x, const Weight& weight, float eps) override;
  void linear(Tensor out, Tensor x, const Weight& weight) override;
  void rope(Tensor x, int head_dim, Tensor cos_sin, bool interleaved) override;
  void store_kv(KVCache& cache, int layer, Tensor k, Tensor v) override;
  void paged_attention(Tensor out, Tensor q, const KVCache& cache, int layer, const AttentionParams& params) override;
  void gated_activation(Tensor out, Tensor gate_up, Gate gate) override;
  void add(Tensor x, Tensor y) override;
  void gather_rows(Tensor out, Tensor x) override;

 private:
  // Runs an operation to its end and adds its time to the row of that name.
  template <class Op>
  void time(const std::string& name, double bytes, double macs, const Op& op) {
    const auto start = std::chrono::steady_clock::now();
    op();
    backend_->synchronize();
    ProfileRow& row = rows_[name];
    row.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    row.calls += 1;
    row.bytes += bytes;
    row.macs += macs;
  }

  std::shared_ptr<Backend> backend_;
  std::map<std::string, ProfileRow> rows_;
  const Batch* batch_ = nullptr;
};

}  // namespace rvllm
