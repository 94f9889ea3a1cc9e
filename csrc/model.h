// The transformer, once, over Backend. What differs between families is data in ModelConfig.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend.h"
#include "pooler.h"
#include "sampler.h"

namespace rvllm {

struct LayerConfig {
  int rope = 0;    // index into ModelConfig::inv_freq
  int window = 0;  // sliding window in tokens; 0: full attention
  int group = 0;   // of layers with this window, and which of them it is
  int index = 0;
};

struct ModelConfig {
  int num_layers = 0;
  int hidden_size = 0;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int intermediate_size = 0;
  int vocab_size = 0;
  double rms_norm_eps = 0;
  double embedding_scale = 1;
  double attention_scale = 0;
  double attention_soft_cap = 0;
  bool rope_interleaved = false;
  bool qk_norm = false;    // RMS norm of each query and key head before RoPE
  bool post_norms = false; // RMS norm of what attention and feed-forward add to the residual
  bool gelu = false;       // gate by gelu (tanh form) instead of silu
  std::vector<std::vector<double>> inv_freq;  // RoPE: angle = position * inv_freq[i], [dim / 2] each
  std::vector<LayerConfig> layers;            // [num_layers]
};

// What a row of logits is wanted for: its sampler picks a token; without one, the log-probability of token_id and of the
// num_best most likely tokens is computed.
struct LogitsReader {
  Sampler* sampler = nullptr;
  int32_t token_id = -1;
  int num_best = 0;
};

// The final hidden states of the tokens [begin, end) of a batch, all of one request, go to a pooler.
struct PooledTokens {
  Pooler* pooler = nullptr;
  int begin = 0;
  int end = 0;
};

// Gives the file's tensor of a name, if it has one.
using TensorSource = std::function<std::optional<HostTensor>(const std::string& name)>;

class Model {
 public:
  // Loads every weight. Throws invalid_argument naming a tensor that is missing, misshapen or of an unsupported type.
  Model(std::shared_ptr<Backend> backend, ModelConfig config, const TensorSource& source);

  // The window of each group of layers that share a KV cache: those of one window, the widest first.
  const std::vector<int>& windows() const { return windows_; }
  void alloc_kv_cache(const std::vector<int>& num_blocks, int block_size, KVType type);  // num_blocks: of each group
  size_t kv_cache_bytes(int group, int num_blocks, int block_size, KVType type) const;

  // Runs one step; readers[i] reads the logits of logits_indices[i]. A row that cannot be sampled or scored has an
  // error instead of a token. Throws invalid_argument when an index of the batch is out of range or a reader does not
  // fit the model, and runtime_error while another thread is in a step. before_sampling, if any, is called once
  // between the forward pass and the readers.
  std::vector<Sample> step(const Batch& batch, const std::vector<LogitsReader>& readers,
                           const std::vector<PooledTokens>& pooled,
                           const std::function<void()>& before_sampling = {});

  // Runs one step and writes the logits [B', V] of logits_indices to out. Throws as step does.
  void logits(const Batch& batch, float* out);

  const ModelConfig& config() const { return config_; }
  Backend& backend() const { return *backend_; }

 private:
  struct Layer {
    std::unique_ptr<Weight> attn_norm, attn_qkv, attn_q_norm, attn_k_norm, attn_output, post_attention_norm;
    std::unique_ptr<Weight> ffn_norm, ffn_gate_up, ffn_down, post_ffw_norm;
  };
  struct Buffer {
    std::shared_ptr<float> data;
    int64_t capacity = 0;
  };

  void group_layers();
  KVCacheSpec kv_cache_spec(int group, int num_blocks, int block_size, KVType type) const;
  void check_batch(const Batch& batch) const;
  void check_blocks(const Batch& batch, int group) const;
  void check_readers(const Batch& batch, const std::vector<LogitsReader>& readers,
                     const std::vector<PooledTokens>& pooled) const;
  Tensor view(Buffer& buffer, int64_t rows, int64_t cols);
  void compute_rope(const Batch& batch);
  Tensor forward(const Batch& batch);
  template <class Body>
  void for_logits(const Batch& batch, const Body& body);

  std::shared_ptr<Backend> backend_;
  ModelConfig config_;
  std::unique_ptr<Weight> token_embd_, output_norm_, output_;  // output_ is null when tied to token_embd_
  std::vector<Layer> layers_;
  std::vector<int> windows_;                        // of each group of layers
  std::vector<std::unique_ptr<KVCache>> kv_caches_;  // one a group
  std::vector<int> num_blocks_;
  int block_size_ = 0;
  Buffer x_, h_, qkv_, attn_, gate_up_, last_, logits_;
  std::vector<Buffer> cos_sin_;     // one a RoPE table: [T, dim / 2 cosines, then dim / 2 sines]
  std::vector<float> host_cos_sin_;
  std::atomic<bool> is_busy_{false};
};

}  // namespace rvllm
