// What a device must do for the transformer. One subclass a device; how weights are packed and where keys and values
// lie is its own business. Letters: T tokens of a step, B requests, H heads, KVH KV heads, D head dim, N out, K in.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "activation.h"
#include "kv_cache.h"
#include "tensor.h"
#include "thread_pool.h"

namespace rvllm {

// Where the keys and values of one group of layers lie: those whose windows are alike, so that they need the same
// tokens. A block that has left the window of all tokens of a request's part of the step is -1 in its table, and never
// read.
struct BlockTables {
  int max_blocks = 0;
  const int32_t* slot_mapping = nullptr;  // [T]              block id * block_size + offset: where a token's K, V go
  const int32_t* block_tables = nullptr;  // [B, max_blocks]
};

// One step's work, ragged: a decode is a request with one token, a chunk of a prompt one with more. Host memory.
struct Batch {
  int num_tokens = 0;                        // T
  int num_requests = 0;                      // B
  int num_logits = 0;                        // B'
  const int32_t* input_ids = nullptr;        // [T]
  const int32_t* positions = nullptr;        // [T]
  const int32_t* query_start_loc = nullptr;  // [B + 1]
  const int32_t* context_lens = nullptr;     // [B]              tokens to attend to, this step's included
  const int32_t* logits_indices = nullptr;   // [B']             tokens whose logits are wanted
  std::vector<BlockTables> groups;           // by KVCache::group
};

// A parameter in the backend's own layout: a matrix [N, K] (of each expert one), or a vector [1, K].
class Weight {
 public:
  virtual ~Weight() = default;
  std::string name;  // of its tensor, or of the first of several, without its layer
  int num_experts = 1;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t bytes = 0;
};

struct AttentionParams {
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int window = 0;         // a token sees this many last positions, itself included; 0: all
  float scale = 0;
  float soft_cap = 0;     // scores become cap * tanh(score / cap); 0: as they are
  const Weight* sinks = nullptr;  // [1, H] or null: for each head one more score in the softmax, without a value
};

enum class NormKind { kRms, kLayer };  // arXiv:1910.07467, arXiv:1607.06450

// Normalizes each `cols` columns of a row alone, cols being the weight's. A weight with more than one row is
// [heads, cols] and has a row for each of them.
struct Norm {
  const Weight* weight = nullptr;
  const Weight* bias = nullptr;  // [1, cols] or null; only of kLayer
  float eps = 0;
  NormKind kind = NormKind::kRms;
};

constexpr float kLeastScores = 6.103515625e-5f;  // llama.cpp's

// Of a mixture of experts. The k with the highest scores are used: a softmax of the logits over all experts
// (arXiv:1701.06538), or the sigmoid of each. A bias counts for the choice alone (arXiv:2408.15664).
struct RouterParams {
  int num_used = 0;         // k, experts of a token
  bool normalized = false;  // their scores are divided by their sum, or kLeastScores where it is less
  bool sigmoid = false;
  float scale = 1;          // of their weights in the end
  const Weight* bias = nullptr;  // [1, E] or null
};

// The rates of the two things that bound a model, with all threads.
struct Ceilings {
  double bytes_per_second = 0;  // reading memory
  double macs_per_second = 0;   // int8 multiply-accumulates, on data at hand
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string name() const = 0;
  virtual ThreadPool& pool() = 0;  // for work on the host, such as sampling
  virtual Ceilings measure_ceilings() = 0;  // takes about 0.2 s; for the profiler

  virtual std::shared_ptr<float> alloc(int64_t count) = 0;                      // floats, in device memory
  virtual void upload(float* dst, const float* src, int64_t count) = 0;         // host to device
  virtual void synchronize() = 0;

  // A whole matrix on the host, to be read and changed: itself where memory is shared, else a copy until the next call.
  virtual float* download(Tensor x) = 0;

  // Stacks matrices of one K along N; `biases` (none, or one [1, N_i] for each part) are added by linear.
  // Throws invalid_argument naming the tensor and its type when there is no kernel for it.
  virtual std::unique_ptr<Weight> load_weight(const std::vector<HostTensor>& parts,
                                              const std::vector<HostTensor>& biases) = 0;
  // The same of tensors [experts * N_i, K] with biases [experts, N_i], for the operations on experts.
  virtual std::unique_ptr<Weight> load_experts(int num_experts, const std::vector<HostTensor>& parts,
                                               const std::vector<HostTensor>& biases) = 0;
  virtual std::unique_ptr<Weight> load_vector(const HostTensor& tensor) = 0;
  virtual std::unique_ptr<KVCache> alloc_kv_cache(const KVCacheSpec& spec) = 0;
  // Of its blocks; more address space may be reserved.
  virtual size_t kv_cache_bytes(const KVCacheSpec& spec) const = 0;

  virtual void begin_step(const Batch& batch) = 0;  // the batch must outlive end_step
  virtual void end_step() = 0;

  virtual void embedding(Tensor out, const Weight& table, float scale) = 0;     // out[T, K] = table[input_ids] * scale
  virtual void norm(Tensor out, Tensor x, const Norm& norm) = 0;                // out may be x
  virtual void linear(Tensor out, Tensor x, const Weight& weight) = 0;          // out[T, N] = x[T, K] W^T + bias
  // The same of norm(x), and of x through an activation, x[T, 2 K] where it is gated: backends make rows as they
  // quantize them.
  virtual void norm_linear(Tensor out, Tensor x, const Norm& norm, const Weight& weight) = 0;
  virtual void activated_linear(Tensor out, Tensor x, Activation activation, const Weight& weight) = 0;
  // x[T, H * D] in place; the elements of a head beyond the table's width stay as they are.
  virtual void rope(Tensor x, int head_dim, Tensor cos_sin, bool interleaved) = 0;
  virtual void store_kv(KVCache& cache, int layer, Tensor k, Tensor v) = 0;     // k, v [T, KVH * D] to slot_mapping
  virtual void paged_attention(Tensor out, Tensor q, const KVCache& cache, int layer,
                               const AttentionParams& params) = 0;              // out, q [T, H * D]
  // Mixture of experts. From one route to the next, each token has k rows in the backend's own order, one for each of
  // its experts: those of the highest scores, which it makes of the logits [T, E] and may leave in their place.
  virtual void route(Tensor logits, const RouterParams& params) = 0;
  virtual void expert_linear(Tensor out, Tensor x, const Weight& experts) = 0;  // out[T k, N] from x[T, K]
  virtual void activated_expert_linear(Tensor out, Tensor x, Activation activation,
                                       const Weight& experts) = 0;              // out[T k, N] from x[T k, K or 2 K]
  virtual void combine(Tensor out, Tensor y) = 0;  // out[T, N]: a token's rows of y[T k, N] times their weights, summed
  virtual void add(Tensor x, Tensor y, float scale) = 0;                        // x += scale * y
  virtual void add_gated(Tensor x, Tensor y, Tensor gate) = 0;                  // x += sigmoid(gate[T, 1]) * y
  virtual void gather_rows(Tensor out, Tensor x) = 0;                           // out[i] = x[logits_indices[i]]
  // Of each row the column of its largest element, the first of equals, or -1 where one is no finite number; on the
  // host, until the next call.
  virtual const int32_t* argmax(Tensor x) = 0;
  virtual void scale_logits(Tensor x, float scale, float soft_cap) = 0;  // x *= scale, then soft_cap as in attention
};

}  // namespace rvllm
