// An NVIDIA GPU as a device: packed weights, one stream, and steps that are replayed as graphs.
//
// Numbers: products by quantized weights, norms, RoPE, activations and attention are computed in the CPU's order, so
// that they have the CPU's bits, in any company. Products by float weights (F32, F16, BF16) have an order of their
// own: the same for any number of tokens up to kMatvecTokens, and cuBLAS's beyond, except for F32. With
// CudaOptions::f16_prefill steps of more than kQuantizedTokens tokens use cuBLAS for quantized weights, too.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend.h"
#include "cuda/attention.h"
#include "cuda/blas.h"
#include "cuda/device_buffer.h"
#include "cuda/quantized_linear.h"
#include "cuda/step_graphs.h"

namespace rvllm::cuda {

struct CudaOptions {
  int device = 0;
  int num_threads = 1;               // of the host: packing weights, sampling
  bool f16_prefill = false;
  bool graphs = true;
  std::vector<std::string> cublas;   // where to look for it
  int num_processors = 0;            // for which work is cut; 0: as many as there are
};

class CudaBackend final : public Backend {
 public:
  // Throws runtime_error saying what is missing when there is no device that CUDA can use.
  explicit CudaBackend(const CudaOptions& options);
  ~CudaBackend() override;

  static constexpr int kMatvecTokens = 16;
  static constexpr int kQuantizedTokens = 512;  // by fewer, writing the weights as F16 takes longer than it saves

  std::string name() const override { return "cuda"; }
  std::pair<size_t, size_t> memory_info() const;  // bytes free, and in all
  int num_replayed() const { return graphs_.num_replayed(); }
  ThreadPool& pool() override { return pool_; }
  Ceilings measure_ceilings() override;

  std::shared_ptr<float> alloc(int64_t count) override;
  void upload(float* dst, const float* src, int64_t count) override;
  void synchronize() override;
  float* download(Tensor x) override;

  std::unique_ptr<Weight> load_weight(const std::vector<HostTensor>& parts,
                                      const std::vector<HostTensor>& biases) override;
  std::unique_ptr<Weight> load_experts(int num_experts, const std::vector<HostTensor>& parts,
                                       const std::vector<HostTensor>& biases) override;
  std::unique_ptr<Weight> load_vector(const HostTensor& tensor) override;
  std::unique_ptr<KVCache> alloc_kv_cache(const KVCacheSpec& spec) override;
  size_t kv_cache_bytes(const KVCacheSpec& spec) const override;

  void begin_step(const Batch& batch) override;
  void end_step() override { graphs_.end(); }

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
  // Memory that operations share, each for its own duration.
  struct Scratch {
    std::shared_ptr<void> memory;
    size_t bytes = 0;
    template <class T = void>
    T* as() const { return static_cast<T*>(memory.get()); }
  };
  // Where the rows of a product come from.
  struct Rows {
    enum Kind { kPlain, kNorm, kActivated } kind = kPlain;
    Tensor x;
    Norm norm;
    Activation activation = Activation::kSiluGated;
    int64_t count = 0, cols = 0;
    const ExpertRows* experts = nullptr;
    int per_source = 1;

    static Rows plain(Tensor x);
    static Rows activated(Tensor x, Activation activation);
  };

  void use_device() const;
  void* to_host(const void* data, size_t pitch, size_t width, size_t rows);
  void reserve(Scratch& scratch, int64_t bytes, const char* what);
  template <class... Values, class F>
  void enqueue(const Signature& signature, F work) {
    graphs_.add(signature.value(), work);
  }
  // The last work noted, if it may yet be made to do more: a product that the next operation adds to the residual
  // stream, or a rotation that the next one continues in the neighbouring columns.
  struct Open {
    size_t num_noted = 0;
    Tensor out;
    std::shared_ptr<Residual> residual;
    std::shared_ptr<Tensor> rotated;
    Tensor cos_sin;
    int head_dim = 0;
    bool interleaved = false;
  };
  bool is_open() const { return open_.num_noted > 0 && open_.num_noted == graphs_.num_noted(); }
  NormRow norm_row(Tensor x, const Norm& norm) const;
  void multiply(Tensor out, const Rows& rows, const Weight& weight);
  void multiply_now(Tensor out, const Rows& rows, const Weight& weight, const Residual& residual);
  void multiply_by_blas(Tensor out, Tensor x, const DeviceMatrix& w, const float* bias);
  bool may_use_blas(const DeviceMatrix& w) const;
  bool uses_blas(const DeviceMatrix& w, const Rows& rows) const;
  Blas& blas();

  CudaOptions options_;
  ThreadPool pool_;
  int num_processors_ = 1;
  Stream stream_;  // made before and gone after all that works on it
  StepGraphs graphs_;
  Staging staging_;
  std::unique_ptr<Blas> blas_;
  Open open_;
  Scratch best_, batch_memory_, quantized_, hidden_, partitions_, blas_weight_, blas_input_, expert_memory_;
  std::shared_ptr<void> download_memory_;
  size_t download_bytes_ = 0;
  StepArrays step_;  // on the device
  ExpertRows experts_;
};

}  // namespace rvllm::cuda
