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
  int rope = 0;    // index into ModelConfig::rope_tables; -1: no RoPE
  int window = 0;  // sliding window in tokens; 0: full attention
  int group = 0;   // of layers with this window, and which of them it is
  int index = 0;
};

// RoPE: element pair i at position p is rotated by p * inv_freq[i] and scaled. arXiv:2104.09864
struct RopeTable {
  std::vector<double> inv_freq;  // [dim / 2]
  double scale = 1;
};

// What attn_q_norm and attn_k_norm normalize: each head by one weight, each by its own, or all heads together.
enum class QkNorm { kNone, kHead, kHeads, kRow };

struct ModelConfig {
  int num_layers = 0;
  int hidden_size = 0;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int intermediate_size = 0;    // of a dense feed-forward network
  int num_experts = 0;          // 0: the network is dense
  int num_experts_per_tok = 0;
  int moe_intermediate_size = 0;            // of each expert
  int shared_expert_intermediate_size = 0;  // of the one that every token uses; 0: there is none
  int first_k_dense_replace = 0;  // layers before the mixtures, whose networks are dense
  bool sigmoid_router = false;  // see RouterParams
  bool norm_topk_prob = false;
  double routed_scaling_factor = 1;
  int vocab_size = 0;
  NormKind norm_kind = NormKind::kRms;
  double norm_eps = 0;
  Activation activation = Activation::kSiluGated;
  bool pre_norms = true;        // of what attention and feed-forward read
  std::string ffn_norm = "ffn_norm";  // name of the latter
  bool post_norms = false;      // of what they add to the residual stream
  bool parallel_block = false;  // both read the same norm of the residual stream
  QkNorm qk_norm = QkNorm::kNone;
  bool qk_norm_after_rope = false;
  double embedding_scale = 1;
  double residual_scale = 1;    // of what attention and feed-forward add
  double logit_scale = 1;
  double logit_soft_cap = 0;    // 0: none
  double attention_scale = 0;
  double attention_soft_cap = 0;
  bool attn_sinks = false;      // each head has one more score in its softmax, without a value
  double temperature_scale = 0;  // queries at position p are multiplied by 1 + scale * ln(1 + floor(p / length))
  int temperature_length = 1;
  bool rope_interleaved = false;
  std::vector<RopeTable> rope_tables;
  std::vector<LayerConfig> layers;  // [num_layers]
};

// What a row of logits is wanted for: its sampler picks a token; without one, the log-probability of token_id and of
// the num_best most likely tokens is computed.
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

struct NormWeights {
  std::unique_ptr<Weight> weight, bias;  // null where the model has no such norm, or no bias
};

// A layer's experts, and the one that every token uses, where there is one.
struct Mixture {
  std::unique_ptr<Weight> ffn_gate_inp, exp_probs_b, ffn_gate_up_exps, ffn_down_exps;  // the second may be null
  std::unique_ptr<Weight> ffn_gate_inp_shexp, ffn_gate_up_shexp, ffn_down_shexp;  // the first may be null alone
};

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
    NormWeights attn_norm, attn_q_norm, attn_k_norm, post_attention_norm, ffn_norm, post_ffw_norm;
    std::unique_ptr<Weight> attn_qkv, attn_sinks, attn_output;
    std::unique_ptr<Weight> ffn_gate_up, ffn_down;  // of a dense network; ffn_gate_up: without a gate, ffn_up
    Mixture mixture;
  };
  struct Buffer {
    std::shared_ptr<float> data;
    int64_t capacity = 0;
  };

  bool has_mixture(int layer) const { return config_.num_experts > 0 && layer >= config_.first_k_dense_replace; }
  void group_layers();
  KVCacheSpec kv_cache_spec(int group, int num_blocks, int block_size, KVType type) const;
  void check_batch(const Batch& batch) const;
  void check_blocks(const Batch& batch, int group) const;
  void check_readers(const Batch& batch, const std::vector<LogitsReader>& readers,
                     const std::vector<PooledTokens>& pooled) const;
  Tensor view(Buffer& buffer, int64_t rows, int64_t cols);
  Norm norm(const NormWeights& weights) const;
  Tensor rope_angles(const Batch& batch, const RopeTable& table, bool of_queries, Buffer& buffer);
  void norm_qk(Tensor q, Tensor k, const Layer& layer);
  void norm_linear(Tensor out, Tensor x, const NormWeights& norm, const Weight& weight);
  int64_t widest_gate_up() const;
  void mix_experts(Tensor out, Tensor x, const Layer& layer);
  Tensor forward(const Batch& batch);
  template <class Body>
  void for_logits(const Batch& batch, const Body& body);

  std::shared_ptr<Backend> backend_;
  ModelConfig config_;
  std::unique_ptr<Weight> token_embd_, output_;  // output_ is null when tied to token_embd_
  NormWeights output_norm_;
  std::vector<Layer> layers_;
  std::vector<int> windows_;                        // of each group of layers
  std::vector<std::unique_ptr<KVCache>> kv_caches_;  // one a group
  std::vector<int> num_blocks_;
  int block_size_ = 0;
  Buffer x_, h_, qkv_, attn_, gate_up_, last_, logits_;
  Buffer normed_, router_logits_, expert_down_;
  std::vector<Buffer> q_angles_, k_angles_;  // one a RoPE table: [T, dim / 2 cosines, then dim / 2 sines]
  std::vector<float> host_angles_;
  std::atomic<bool> is_busy_{false};
};

}  // namespace rvllm
