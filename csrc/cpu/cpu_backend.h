// The processor as a device: packed weights, a kernel table for its instruction set, and a pool of threads.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend.h"
#include "cpu/arena.h"
#include "cpu/attention_plan.h"
#include "cpu/expert_plan.h"
#include "cpu/kernels.h"
#include "thread_pool.h"

namespace rvllm {

class CpuBackend final : public Backend {
 public:
  // isa: a table's name, or empty for RVLLM_ISA or else the best. Throws invalid_argument when it is not available.
  CpuBackend(int num_threads, const std::string& isa);

  std::string name() const override { return "cpu"; }
  const char* isa() const { return kernels_.name; }
  ThreadPool& pool() override { return pool_; }
  Ceilings measure_ceilings() override;

  std::shared_ptr<float> alloc(int64_t count) override;
  void upload(float* dst, const float* src, int64_t count) override;
  float* download(Tensor x) override { return x.data; }
  void synchronize() override {}

  std::unique_ptr<Weight> load_weight(const std::vector<HostTensor>& parts,
                                      const std::vector<HostTensor>& biases) override;
  std::unique_ptr<Weight> load_experts(int num_experts, const std::vector<HostTensor>& parts,
                                       const std::vector<HostTensor>& biases) override;
  std::unique_ptr<Weight> load_vector(const HostTensor& tensor) override;
  std::unique_ptr<KVCache> alloc_kv_cache(const KVCacheSpec& spec) override;
  size_t kv_cache_bytes(const KVCacheSpec& spec) const override;

  void begin_step(const Batch& batch) override;
  void end_step() override {}

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
  // Calls body(row, thread) for each row, several rows a time.
  template <class Body>
  void for_rows(int64_t rows, const Body& body) {
    const int64_t grain = std::max<int64_t>(1, rows / (4 * pool_.size()));
    pool_.parallel_for(rows, grain, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t row = begin; row < end; ++row) body(row, thread);
    });
  }
  void norm_row(const float* x, int64_t cols, const Norm& norm, float* out) const;
  QuantizedRows quantized_rows(int64_t rows, int64_t k);
  Tensor linear_input(int64_t rows, int64_t k);
  // Each group of rows by its expert. make_row(t), if any, writes row t of x just before it is quantized, while it is
  // in the first-level cache.
  void multiply(Tensor out, Tensor x, const Weight& weight, const std::vector<ExpertRows>& groups,
                const std::function<void(int64_t)>& make_row);
  void multiply_activated(Tensor out, Tensor x, Activation activation, const Weight& weight,
                          const std::vector<ExpertRows>& groups);
  const AttentionPlan& attention_plan(const AttentionParams& params, const BlockTables& tables, int block_size);

  const Kernels& kernels_;
  ThreadPool pool_;
  Arena arena_;
  const Batch* batch_ = nullptr;
  std::vector<AttentionPlan> attention_plans_;  // of this step, one for each kind of layer
  ExpertPlan experts_;                          // of the last route
  std::vector<float> attention_rows_;           // results of partitions: those that are kept, then two a thread
  // Quantized activations of the linear under way, kept from one to the next.
  std::shared_ptr<float> q_;  // int8, from a cache line on, which holds two rows of a tile
  std::vector<float> scale_, scaled_sum_;
  std::vector<int32_t> sum_, half_sum_;
  std::vector<int32_t> best_;        // of argmax
  std::vector<float> linear_input_;  // what norm_linear and activated_linear multiply
};

}  // namespace rvllm
