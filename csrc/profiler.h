// Times every operation of a backend. It stands between the model and the backend, and only while profiling: switched
// off, nothing of it runs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend.h"
#include "recorder.h"

namespace rvllm {

// Totals of one operation (for linear: of one kind of weight).
struct ProfileRow {
  std::string name;
  int64_t calls = 0;
  int64_t ns = 0;    // as the caller saw it
  double bytes = 0;  // weights and KV cache read or written; activations stay in the caches
  double macs = 0;   // multiply-accumulates
  std::vector<int64_t> busy_ns = {};  // of each thread of the pool, the caller's first
};

class ProfiledBackend final : public Backend {
 public:
  explicit ProfiledBackend(std::shared_ptr<Backend> backend);

  // By operation, as slices number them; those without calls have not run. Row 0 is what the pool does outside of
  // operations, which is sampling.
  std::vector<ProfileRow> rows() const;
  const Recorder& recorder() const { return recorder_; }
  void reset();
  void reset_totals();  // slices are kept

  std::string name() const override { return backend_->name(); }
  Ceilings measure_ceilings() override { return backend_->measure_ceilings(); }
  ThreadPool& pool() override { return backend_->pool(); }
  std::shared_ptr<float> alloc(int64_t count) override { return backend_->alloc(count); }
  void synchronize() override { backend_->synchronize(); }
  void upload(float* dst, const float* src, int64_t count) override;
  float* download(Tensor x) override;
  std::unique_ptr<Weight> load_weight(const std::vector<HostTensor>& parts,
                                      const std::vector<HostTensor>& biases) override {
    return backend_->load_weight(parts, biases);
  }
  std::unique_ptr<Weight> load_experts(int num_experts, const std::vector<HostTensor>& parts,
                                       const std::vector<HostTensor>& biases) override {
    return backend_->load_experts(num_experts, parts, biases);
  }
  std::unique_ptr<Weight> load_vector(const HostTensor& tensor) override { return backend_->load_vector(tensor); }
  std::unique_ptr<KVCache> alloc_kv_cache(const KVCacheSpec& spec) override;
  size_t kv_cache_bytes(const KVCacheSpec& spec) const override { return backend_->kv_cache_bytes(spec); }

  void begin_step(const Batch& batch) override;
  void end_step() override { backend_->end_step(); }
  void embedding(Tensor out, const Weight& table, float scale) override;
  void norm(Tensor out, Tensor x, const Norm& norm) override;
  void linear(Tensor out, Tensor x, const Weight& weight) override;
  void norm_linear(Tensor out, Tensor x, const Norm& norm, const Weight& weight) override;
  void activated_linear(Tensor out, Tensor x, Activation activation, const Weight& weight) override;
  void rope(Tensor x, int head_dim, Tensor cos_sin, bool interleaved) override;
  void store_kv(KVCache& cache, int layer, Tensor k, Tensor v) override;
  void paged_attention(Tensor out, Tensor q, const KVCache& cache, int layer, const AttentionParams& params) override;
  void route(Tensor logits, const RouterParams& params) override;
  void expert_linear(Tensor out, Tensor x, const Weight& experts) override;
  void activated_expert_linear(Tensor out, Tensor x, Activation activation, const Weight& experts) override;
  void combine(Tensor out, Tensor y) override;
  void add(Tensor x, Tensor y, float scale) override;
  void add_gated(Tensor x, Tensor y, Tensor gate) override;
  void gather_rows(Tensor out, Tensor x) override;
  const int32_t* argmax(Tensor x) override;
  void scale_logits(Tensor x, float scale, float soft_cap) override;

 private:
  // Runs an operation to its end and adds its time and work to its row.
  template <class Op>
  void time(size_t row, double bytes, double macs, const Op& op) {
    recorder_.operation = int64_t(row);
    const int64_t start = now_ns();
    op();
    backend_->synchronize();
    recorder_.threads[0].add(int64_t(row), start, now_ns());
    recorder_.operation = 0;
    rows_[row].bytes += bytes;
    rows_[row].macs += macs;
  }
  size_t linear_row(const Weight& weight);

  std::shared_ptr<Backend> backend_;
  Recorder& recorder_;  // the pool's
  std::vector<ProfileRow> rows_;
  std::vector<std::string> linear_names_;  // of the weights of the last rows
  double kv_bytes_ = 0;                    // of one token in one layer
  const Batch* batch_ = nullptr;
};

}  // namespace rvllm
