// An Apple GPU as a device: memory shared with the host, and one command buffer a step.
//
// Numbers, by the order of operations in the kernels: products by quantized weights, norms, RoPE, activations and
// attention are those of the CPU. Products by float weights have an order of their own: the same for any number of
// tokens up to kMatvecTokens. Beyond, F16 and BF16 weights, and with f16_prefill quantized ones, are multiplied by the
// matrices of a simdgroup in float32, or by MPS (not BF16) with activations and dequantized weights rounded to F16.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend.h"
#include "metal/kernel_args.h"
#include "metal/metal_device.h"
#include "step_arrays.h"

namespace rvllm {

struct MetalMatrix;

class MetalBackend final : public Backend {
 public:
  // library: the kernels, compiled (.metallib) or as source. Throws runtime_error saying what is missing.
  // mps: for many tokens MPSMatrixMultiplication takes the place of the matrices of a simdgroup.
  MetalBackend(int num_threads, const std::string& library, bool f16_prefill, bool mps);

  static constexpr int kMatvecTokens = 16;

  std::string name() const override { return "metal"; }
  std::string device_name() const { return device_.name(); }
  std::pair<size_t, size_t> memory_info() const { return device_.memory_info(); }
  ThreadPool& pool() override { return pool_; }
  Ceilings measure_ceilings() override;

  std::shared_ptr<float> alloc(int64_t count) override;
  void upload(float* dst, const float* src, int64_t count) override;
  void synchronize() override { device_.synchronize(); }
  float* download(Tensor x) override;

  std::unique_ptr<Weight> load_weight(const std::vector<HostTensor>& parts,
                                      const std::vector<HostTensor>& biases) override;
  std::unique_ptr<Weight> load_experts(int num_experts, const std::vector<HostTensor>& parts,
                                       const std::vector<HostTensor>& biases) override;
  std::unique_ptr<Weight> load_vector(const HostTensor& tensor) override;
  std::unique_ptr<KVCache> alloc_kv_cache(const KVCacheSpec& spec) override;
  size_t kv_cache_bytes(const KVCacheSpec& spec) const override;

  void begin_step(const Batch& batch) override;
  void end_step() override { device_.commit(); }

  void embedding(Tensor out, const Weight& table, float scale) override;
  void norm(Tensor out, Tensor x, const Norm& norm) override;
  void linear(Tensor out, Tensor x, const Weight& weight) override { multiply(out, x, weight, nullptr, 1); }
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
  // Memory that operations share, each for its own duration.
  struct Scratch {
    std::shared_ptr<void> memory;
    size_t bytes = 0;
    template <class T = void>
    T* as() const { return static_cast<T*>(memory.get()); }
  };
  // A step's choices of experts. For products they are sorted by expert, those of each begin at a multiple of 8.
  struct ExpertRows {
    int num_used = 0, num_choices = 0, num_tiles = 0;
    int *experts = nullptr, *places = nullptr, *choices = nullptr, *tile_expert = nullptr;
    float* weights = nullptr;
  };

  void reserve(Scratch& scratch, int64_t bytes, const char* what);
  Tensor activated(Tensor x, Activation activation);
  // Row i of out is made of row i / per_source of x.
  void multiply(Tensor out, Tensor x, const Weight& weight, const ExpertRows* experts, int per_source);
  void multiply_by_mps(Tensor out, Tensor x, const MetalMatrix& w, const float* bias);
  // Whether float activations are multiplied by tiles of the weights, by MPS or by `matmul`.
  bool uses_tiles(const MetalMatrix& w, int64_t tokens, const ExpertRows* experts) const;
  bool fits_mps(const MetalMatrix& w, int64_t tokens) const;

  MetalDevice device_;
  ThreadPool pool_;
  bool f16_prefill_, mps_;
  Scratch batch_memory_, quantized_, hidden_, partitions_, mps_weight_, mps_input_, expert_memory_, best_;
  StepArrays step_;
  ExpertRows experts_;
};

}  // namespace rvllm
