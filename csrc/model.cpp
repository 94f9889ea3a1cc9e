#include "model.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "check.h"
#include "weight_loader.h"

namespace rvllm {
namespace {

constexpr int kLogitsRows = 64;  // of logits at a time: all those of a long prompt would take more than its weights

// Two steps of one model at a time would share their buffers.
class BusyGuard {
 public:
  explicit BusyGuard(std::atomic<bool>& is_busy) : is_busy_(is_busy) {
    if (is_busy_.exchange(true)) throw std::runtime_error("the model is in use by another thread");
  }
  ~BusyGuard() { is_busy_ = false; }

 private:
  std::atomic<bool>& is_busy_;
};

}  // namespace

Model::Model(std::shared_ptr<Backend> backend, ModelConfig config, const TensorSource& source)
    : backend_(std::move(backend)), config_(std::move(config)) {
  group_layers();
  const ModelConfig& c = config_;
  const int64_t hidden = c.hidden_size;
  WeightLoader load(*backend_, c, source);
  token_embd_ = load.matrix({{"token_embd", c.vocab_size}}, hidden);
  for (int l = 0; l < c.num_layers; ++l) {
    const std::string blk = "blk." + std::to_string(l) + ".";
    Layer layer;
    if (c.pre_norms) layer.attn_norm = load.norm(blk + "attn_norm", hidden);
    layer.attn_qkv = load.attn_qkv(blk);
    if (c.qk_norm != QkNorm::kNone) {
      layer.attn_q_norm = load.head_norm(blk + "attn_q_norm", c.num_heads);
      layer.attn_k_norm = load.head_norm(blk + "attn_k_norm", c.num_kv_heads);
    }
    if (c.attn_sinks) layer.attn_sinks = load.vector(blk + "attn_sinks.weight", c.num_heads);
    layer.attn_output = load.matrix({{blk + "attn_output", hidden}}, int64_t(c.num_heads) * c.head_dim);
    if (c.post_norms) layer.post_attention_norm = load.norm(blk + "post_attention_norm", hidden);
    if (c.pre_norms && !c.parallel_block) layer.ffn_norm = load.norm(blk + c.ffn_norm, hidden);
    if (has_mixture(l)) {
      layer.mixture = load.mixture(blk);
    } else {
      layer.ffn_gate_up = load.ffn_gate_up(blk);
      layer.ffn_down = load.matrix({{blk + "ffn_down", hidden}}, c.intermediate_size);
    }
    if (c.post_norms) layer.post_ffw_norm = load.norm(blk + "post_ffw_norm", hidden);
    layers_.push_back(std::move(layer));
  }
  output_norm_ = load.norm("output_norm", hidden);
  if (load.has("output.weight")) output_ = load.matrix({{"output", c.vocab_size}}, hidden);
  q_angles_.resize(c.rope_tables.size());
  k_angles_.resize(c.rope_tables.size());
}

void Model::group_layers() {
  for (const LayerConfig& layer : config_.layers)
    if (std::find(windows_.begin(), windows_.end(), layer.window) == windows_.end()) windows_.push_back(layer.window);
  const auto width = [](int window) { return window > 0 ? window : INT_MAX; };
  std::sort(windows_.begin(), windows_.end(), [&](int a, int b) { return width(a) > width(b); });
  std::vector<int> sizes(windows_.size());
  for (LayerConfig& layer : config_.layers) {
    layer.group = int(std::find(windows_.begin(), windows_.end(), layer.window) - windows_.begin());
    layer.index = sizes[size_t(layer.group)]++;
  }
}

KVCacheSpec Model::kv_cache_spec(int group, int num_blocks, int block_size, KVType type) const {
  check(group >= 0 && group < int(windows_.size()), "[kv_cache] group ", group, " of ", windows_.size());
  const auto of_group = [&](const LayerConfig& layer) { return layer.group == group; };
  const auto num_layers = std::count_if(config_.layers.begin(), config_.layers.end(), of_group);
  return {int(num_layers), num_blocks, block_size, config_.num_kv_heads, config_.head_dim, type};
}

void Model::alloc_kv_cache(const std::vector<int>& num_blocks, int block_size, KVType type) {
  check(num_blocks.size() == windows_.size(), "[kv_cache] ", num_blocks.size(), " numbers of blocks for ",
        windows_.size(), " groups of layers");
  kv_caches_.clear();
  for (size_t g = 0; g < windows_.size(); ++g) {
    kv_caches_.push_back(backend_->alloc_kv_cache(kv_cache_spec(int(g), num_blocks[g], block_size, type)));
    kv_caches_.back()->group = int(g);
  }
  num_blocks_ = num_blocks;
  block_size_ = block_size;
}

size_t Model::kv_cache_bytes(int group, int num_blocks, int block_size, KVType type) const {
  return backend_->kv_cache_bytes(kv_cache_spec(group, num_blocks, block_size, type));
}

void Model::check_batch(const Batch& b) const {
  check(!kv_caches_.empty(), "[forward] no KV cache: alloc_kv_cache comes first");
  check(b.groups.size() == kv_caches_.size(), "[forward] block tables for ", b.groups.size(), " groups of layers, the "
        "model has ", kv_caches_.size());
  check(b.query_start_loc[0] == 0 && b.query_start_loc[b.num_requests] == b.num_tokens,
        "[forward] query_start_loc does not span the ", b.num_tokens, " tokens");
  for (int t = 0; t < b.num_tokens; ++t)
    check(b.input_ids[t] >= 0 && b.input_ids[t] < config_.vocab_size, "[forward] token id ", b.input_ids[t],
          " is outside the vocabulary of ", config_.vocab_size);
  for (int r = 0; r < b.num_requests; ++r) {
    const int begin = b.query_start_loc[r], end = b.query_start_loc[r + 1];
    check(begin < end && end <= b.num_tokens, "[forward] request ", r, " of the batch has tokens ", begin, " to ", end,
          " of ", b.num_tokens);
    check(b.context_lens[r] >= end - begin, "[forward] ", end - begin, " tokens do not fit a context of ",
          b.context_lens[r]);
    for (int t = begin; t < end; ++t)
      check(b.positions[t] == b.context_lens[r] - (end - t), "[forward] position ", b.positions[t], " where ",
            b.context_lens[r] - (end - t), " would end a context of ", b.context_lens[r]);
  }
  for (int i = 0; i < b.num_logits; ++i)
    check(b.logits_indices[i] >= 0 && b.logits_indices[i] < b.num_tokens, "[forward] logits index ",
          b.logits_indices[i], " is outside the ", b.num_tokens, " tokens");
  for (int g = 0; g < int(b.groups.size()); ++g) check_blocks(b, g);
}

// Of a batch whose requests and positions are sound. Blocks before the window may have been given away.
void Model::check_blocks(const Batch& b, int group) const {
  const BlockTables& tables = b.groups[size_t(group)];
  const int num_blocks = num_blocks_[size_t(group)], window = windows_[size_t(group)];
  for (int t = 0; t < b.num_tokens; ++t)
    check(tables.slot_mapping[t] >= 0 && tables.slot_mapping[t] / block_size_ < num_blocks, "[forward] slot ",
          tables.slot_mapping[t], " is outside the ", num_blocks, " blocks of ", block_size_);
  for (int r = 0; r < b.num_requests; ++r) {
    const int64_t blocks = (int64_t(b.context_lens[r]) + block_size_ - 1) / block_size_;
    check(blocks <= tables.max_blocks, "[forward] a context of ", b.context_lens[r], " tokens needs ", blocks,
          " blocks, its table has ", tables.max_blocks);
    const int last_hidden = window > 0 ? b.positions[b.query_start_loc[r]] - window : -1;
    for (int64_t i = 0; i < blocks; ++i) {
      const int32_t block = tables.block_tables[int64_t(r) * tables.max_blocks + i];
      const bool is_gone = block == -1 && (i + 1) * block_size_ - 1 <= last_hidden;
      check(is_gone || (block >= 0 && block < num_blocks), "[forward] block ", block, " is outside the pool of ",
            num_blocks);
    }
  }
}

void Model::check_readers(const Batch& batch, const std::vector<LogitsReader>& readers,
                          const std::vector<PooledTokens>& pooled) const {
  check(int(readers.size()) == batch.num_logits, "[step] ", readers.size(), " readers for ", batch.num_logits,
        " rows of logits");
  for (const LogitsReader& reader : readers)
    if (reader.sampler)
      check(reader.sampler->vocab_size() == config_.vocab_size, "[step] a sampler for ", reader.sampler->vocab_size(),
            " tokens does not fit the vocabulary of ", config_.vocab_size);
    else
      check(reader.token_id >= 0 && reader.token_id < config_.vocab_size && reader.num_best >= 0, "[step] token id ",
            reader.token_id, " with ", reader.num_best, " alternatives is outside the vocabulary of ",
            config_.vocab_size);
  for (const PooledTokens& p : pooled)
    check(p.pooler && p.pooler->hidden_size() == config_.hidden_size && p.begin >= 0 && p.begin < p.end &&
              p.end <= batch.num_tokens,
          "[step] a pooler does not fit tokens ", p.begin, " to ", p.end, " of ", batch.num_tokens);
}

Tensor Model::view(Buffer& buffer, int64_t rows, int64_t cols) {
  if (buffer.capacity < rows * cols) {
    buffer.data = backend_->alloc(rows * cols);
    buffer.capacity = rows * cols;
  }
  return Tensor(buffer.data.get(), rows, cols);
}

Norm Model::norm(const NormWeights& weights) const {
  return {weights.weight.get(), weights.bias.get(), float(config_.norm_eps), config_.norm_kind};
}

// Scaled cosines and sines of every token's angles, in double so that long contexts keep their precision.
Tensor Model::rope_angles(const Batch& batch, const RopeTable& table, bool of_queries, Buffer& buffer) {
  const size_t half = table.inv_freq.size();
  host_angles_.resize(size_t(batch.num_tokens) * 2 * half);
  float* out = host_angles_.data();
  for (int t = 0; t < batch.num_tokens; ++t, out += 2 * half) {
    double scale = table.scale;
    if (of_queries)
      scale *= 1 + config_.temperature_scale * std::log(1 + batch.positions[t] / config_.temperature_length);
    for (size_t i = 0; i < half; ++i) {
      const double angle = batch.positions[t] * table.inv_freq[i];
      out[i] = float(std::cos(angle) * scale);
      out[half + i] = float(std::sin(angle) * scale);
    }
  }
  const Tensor device = view(buffer, batch.num_tokens, int64_t(2 * half));
  backend_->upload(device.data, host_angles_.data(), device.rows * device.cols);
  return device;
}

void Model::norm_qk(Tensor q, Tensor k, const Layer& layer) {
  if (config_.qk_norm == QkNorm::kNone) return;
  backend_->norm(q, q, norm(layer.attn_q_norm));
  backend_->norm(k, k, norm(layer.attn_k_norm));
}

// x, normalized if there is a norm, through a matrix.
void Model::norm_linear(Tensor out, Tensor x, const NormWeights& weights, const Weight& weight) {
  if (weights.weight)
    backend_->norm_linear(out, x, norm(weights), weight);
  else
    backend_->linear(out, x, weight);
}

// Floats of a token between the two products of its feed-forward network, dense or of experts, where they are most.
int64_t Model::widest_gate_up() const {
  int64_t widest = (is_gated(config_.activation) ? 2 : 1) * int64_t(config_.intermediate_size);
  for (const Layer& layer : layers_) {
    const Mixture& m = layer.mixture;
    if (m.ffn_gate_up_exps) widest = std::max(widest, config_.num_experts_per_tok * m.ffn_gate_up_exps->rows);
    if (m.ffn_gate_up_shexp) widest = std::max(widest, m.ffn_gate_up_shexp->rows);
  }
  return widest;
}

// What the mixture of experts of a layer makes of x: [T, E].
void Model::mix_experts(Tensor out, Tensor x, const Layer& layer) {
  const ModelConfig& c = config_;
  const Mixture& m = layer.mixture;
  Backend& b = *backend_;
  const int64_t T = x.rows, E = x.cols, rows = T * c.num_experts_per_tok;
  const Tensor h = view(normed_, T, E);
  const Tensor router_logits = view(router_logits_, T, c.num_experts);
  const Tensor gate_up = view(gate_up_, rows, m.ffn_gate_up_exps->rows);
  const Tensor down = view(expert_down_, rows, E);
  b.norm(h, x, norm(layer.ffn_norm));
  b.linear(router_logits, h, *m.ffn_gate_inp);
  b.route(router_logits, {c.num_experts_per_tok, c.norm_topk_prob, c.sigmoid_router, float(c.routed_scaling_factor),
                          m.exp_probs_b.get()});
  b.expert_linear(gate_up, h, *m.ffn_gate_up_exps);
  b.activated_expert_linear(down, gate_up, c.activation, *m.ffn_down_exps);
  b.combine(out, down);
  if (!m.ffn_down_shexp) return;
  const Tensor shared_gate_up = view(gate_up_, T, m.ffn_gate_up_shexp->rows);
  const Tensor shared = view(expert_down_, T, E);
  b.linear(shared_gate_up, h, *m.ffn_gate_up_shexp);
  b.activated_linear(shared, shared_gate_up, c.activation, *m.ffn_down_shexp);
  if (m.ffn_gate_inp_shexp) {
    const Tensor gate = view(router_logits_, T, 1);
    b.linear(gate, h, *m.ffn_gate_inp_shexp);
    b.add_gated(out, shared, gate);
  } else {
    b.add(out, shared, 1.0f);
  }
}

// The residual stream [T, E] after the last layer; the final hidden states of logits_indices are in last_.
Tensor Model::forward(const Batch& batch) {
  const ModelConfig& c = config_;
  Backend& b = *backend_;
  const int64_t T = batch.num_tokens, E = c.hidden_size, I = c.intermediate_size;
  const int64_t Q = int64_t(c.num_heads) * c.head_dim, KV = int64_t(c.num_kv_heads) * c.head_dim;
  const float residual_scale = float(c.residual_scale);

  Tensor x = view(x_, T, E);                    // the residual stream
  Tensor h = view(h_, T, E);                    // a branch off it
  Tensor qkv = view(qkv_, T, Q + 2 * KV);
  Tensor attn = view(attn_, T, Q);
  view(gate_up_, T, widest_gate_up());  // it must not grow under work that is noted
  Tensor gate_up = view(gate_up_, T, is_gated(c.activation) ? 2 * I : I);
  Tensor last = view(last_, batch.num_logits, E);
  const Tensor q = qkv.columns(0, Q), k = qkv.columns(Q, KV), v = qkv.columns(Q + KV, KV);
  std::vector<Tensor> q_angles, k_angles;  // of each RoPE table
  for (size_t i = 0; i < c.rope_tables.size(); ++i) {
    const RopeTable& table = c.rope_tables[i];
    k_angles.push_back(rope_angles(batch, table, false, k_angles_[i]));
    q_angles.push_back(c.temperature_scale == 0 ? k_angles[i] : rope_angles(batch, table, true, q_angles_[i]));
  }

  b.begin_step(batch);
  b.embedding(x, *token_embd_, float(c.embedding_scale));
  for (int l = 0; l < c.num_layers; ++l) {
    const Layer& layer = layers_[size_t(l)];
    const LayerConfig& shape = c.layers[size_t(l)];

    norm_linear(qkv, x, layer.attn_norm, *layer.attn_qkv);
    if (!c.qk_norm_after_rope) norm_qk(q, k, layer);
    if (shape.rope >= 0) {
      b.rope(q, c.head_dim, q_angles[size_t(shape.rope)], c.rope_interleaved);
      b.rope(k, c.head_dim, k_angles[size_t(shape.rope)], c.rope_interleaved);
    }
    if (c.qk_norm_after_rope) norm_qk(q, k, layer);
    KVCache& kv_cache = *kv_caches_[size_t(shape.group)];
    b.store_kv(kv_cache, shape.index, k, v);  // all tokens before any attends: requests of one step may share blocks
    b.paged_attention(attn, q, kv_cache, shape.index,
                      {c.num_heads, c.num_kv_heads, c.head_dim, shape.window, float(c.attention_scale),
                       float(c.attention_soft_cap), layer.attn_sinks.get()});
    b.linear(h, attn, *layer.attn_output);
    if (c.post_norms) b.norm(h, h, norm(layer.post_attention_norm));

    if (has_mixture(l)) {
      b.add(x, h, residual_scale);
      mix_experts(h, x, layer);
    } else {
      if (!c.parallel_block) b.add(x, h, residual_scale);
      norm_linear(gate_up, x, c.parallel_block ? layer.attn_norm : layer.ffn_norm, *layer.ffn_gate_up);
      if (c.parallel_block) b.add(x, h, residual_scale);  // not before the feed-forward network has read x
      b.activated_linear(h, gate_up, c.activation, *layer.ffn_down);
    }
    if (c.post_norms) b.norm(h, h, norm(layer.post_ffw_norm));
    b.add(x, h, residual_scale);
  }
  if (batch.num_logits > 0) {
    b.gather_rows(last, x);
    b.norm(last, last, norm(output_norm_));
  }
  return x;
}

// Calls body(first row, logits of some rows) until all rows of last_ have had their turn.
template <class Body>
void Model::for_logits(const Batch& batch, const Body& body) {
  const Tensor last = view(last_, batch.num_logits, config_.hidden_size);
  for (int64_t first = 0; first < last.rows; first += kLogitsRows) {
    const int64_t count = std::min<int64_t>(kLogitsRows, last.rows - first);
    const Tensor logits = view(logits_, count, config_.vocab_size);
    backend_->linear(logits, last.slice(first, count), output_ ? *output_ : *token_embd_);
    if (config_.logit_scale != 1 || config_.logit_soft_cap > 0)
      backend_->scale_logits(logits, float(config_.logit_scale), float(config_.logit_soft_cap));
    body(first, logits);
  }
}

void Model::logits(const Batch& batch, float* out) {
  const BusyGuard guard(is_busy_);
  check_batch(batch);
  forward(batch);
  for_logits(batch, [&](int64_t first, Tensor logits) {
    const size_t bytes = size_t(logits.rows * logits.cols) * sizeof(float);
    std::memcpy(out + first * logits.cols, backend_->download(logits), bytes);
  });
  backend_->end_step();
}

std::vector<Sample> Model::step(const Batch& batch, const std::vector<LogitsReader>& readers,
                                const std::vector<PooledTokens>& pooled,
                                const std::function<void()>& before_sampling) {
  const BusyGuard guard(is_busy_);
  check_batch(batch);
  check_readers(batch, readers, pooled);
  const Tensor x = forward(batch);
  std::vector<Sample> samples(readers.size());
  for_logits(batch, [&](int64_t first, Tensor logits) {
    if (first == 0 && before_sampling) before_sampling();
    // Where every row wants its best token alone, only these come down from the device.
    const auto* const begin = readers.data() + first;
    const bool greedy = std::all_of(begin, begin + logits.rows,
                                    [](const LogitsReader& r) { return r.sampler && r.sampler->is_greedy(); });
    const int32_t* const best = greedy ? backend_->argmax(logits) : nullptr;
    float* const rows = greedy ? nullptr : backend_->download(logits);
    backend_->pool().parallel_for(logits.rows, 1, [&](int64_t row, int64_t, int) {
      const LogitsReader& reader = readers[size_t(first + row)];
      Sample& sample = samples[size_t(first + row)];
      float* const values = greedy ? nullptr : rows + row * logits.cols;
      try {
        if (greedy) {
          sample = reader.sampler->take_best(best[row]);
        } else if (reader.sampler) {
          sample = reader.sampler->sample(values);
        } else {
          check_logits(values, config_.vocab_size);
          sample = {reader.token_id,
                    log_probabilities(values, config_.vocab_size, reader.token_id, reader.num_best), {}};
        }
      } catch (const std::exception& e) {
        sample.error = e.what();  // ends this request, not those beside it
      }
    });
  });
  for (const PooledTokens& p : pooled) {
    const Tensor states = x.slice(p.begin, p.end - p.begin);
    backend_->norm(states, states, norm(output_norm_));
    p.pooler->add(backend_->download(states), states.cols, batch.positions[p.begin], int(states.rows));
  }
  backend_->end_step();
  return samples;
}

}  // namespace rvllm
