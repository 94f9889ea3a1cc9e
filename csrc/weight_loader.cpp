#include "weight_loader.h"

#include "check.h"

namespace rvllm {

HostTensor WeightLoader::find(const std::string& name, int64_t rows, int64_t cols) const {
  std::optional<HostTensor> t = source_(name);
  check(t.has_value(), name, ": tensor is missing");
  check(t->rows == rows && t->cols == cols, name, ": shape [", t->rows, ", ", t->cols, "], expected [", rows, ", ",
        cols, "]");
  return *t;
}

std::unique_ptr<Weight> WeightLoader::vector(const std::string& name, int64_t cols) {
  return backend_.load_vector(find(name, 1, cols));
}

NormWeights WeightLoader::norm(const std::string& name, int64_t cols, int64_t rows) {
  NormWeights norm;
  norm.weight = backend_.load_vector(find(name + ".weight", rows, cols));
  if (config_.norm_kind == NormKind::kLayer && has(name + ".bias"))
    norm.bias = backend_.load_vector(find(name + ".bias", rows, cols));
  return norm;
}

NormWeights WeightLoader::head_norm(const std::string& name, int heads) {
  const int64_t dim = config_.head_dim;
  if (config_.qk_norm == QkNorm::kRow) return norm(name, heads * dim);
  return norm(name, dim, config_.qk_norm == QkNorm::kHeads ? heads : 1);
}

std::unique_ptr<Weight> WeightLoader::matrix(const Parts& parts, int64_t cols) { return stack(parts, cols, 0); }

std::unique_ptr<Weight> WeightLoader::stack(const Parts& parts, int64_t cols, int num_experts) {
  const int64_t count = num_experts > 0 ? num_experts : 1;
  std::vector<HostTensor> tensors, biases;
  for (const auto& [name, rows] : parts) {
    tensors.push_back(find(name + ".weight", count * rows, cols));
    if (has(name + ".bias")) biases.push_back(find(name + ".bias", count, rows));
  }
  const std::string& first = parts.front().first;
  check(biases.empty() || biases.size() == tensors.size(), first,
        ".bias: some of the matrices beside it have a bias and some have not");
  auto weight = num_experts > 0 ? backend_.load_experts(num_experts, tensors, biases)
                                : backend_.load_weight(tensors, biases);
  weight->name = first.substr(first.rfind('.') + 1);
  return weight;
}

std::unique_ptr<Weight> WeightLoader::attn_qkv(const std::string& blk) {
  const int64_t dim = config_.head_dim, q = config_.num_heads * dim, kv = config_.num_kv_heads * dim;
  if (has(blk + "attn_qkv.weight")) return matrix({{blk + "attn_qkv", q + 2 * kv}}, config_.hidden_size);
  return matrix({{blk + "attn_q", q}, {blk + "attn_k", kv}, {blk + "attn_v", kv}}, config_.hidden_size);
}

std::unique_ptr<Weight> WeightLoader::ffn_gate_up(const std::string& blk) {
  const int64_t n = config_.intermediate_size;
  if (!is_gated(config_.activation)) return matrix({{blk + "ffn_up", n}}, config_.hidden_size);
  const std::optional<HostTensor> up = source_(blk + "ffn_up.weight");
  if (up && up->rows == 2 * n) return matrix({{blk + "ffn_up", 2 * n}}, config_.hidden_size);
  return matrix({{blk + "ffn_gate", n}, {blk + "ffn_up", n}}, config_.hidden_size);
}

Mixture WeightLoader::mixture(const std::string& blk) {
  const int64_t hidden = config_.hidden_size, n = config_.moe_intermediate_size;
  const int64_t shared = config_.shared_expert_intermediate_size;
  Mixture m;
  m.ffn_gate_inp = matrix({{blk + "ffn_gate_inp", config_.num_experts}}, hidden);
  if (has(blk + "exp_probs_b.bias")) m.exp_probs_b = vector(blk + "exp_probs_b.bias", config_.num_experts);
  m.ffn_gate_up_exps = stack({{blk + "ffn_gate_exps", n}, {blk + "ffn_up_exps", n}}, hidden, config_.num_experts);
  m.ffn_down_exps = stack({{blk + "ffn_down_exps", hidden}}, n, config_.num_experts);
  if (shared == 0) return m;
  if (has(blk + "ffn_gate_inp_shexp.weight")) m.ffn_gate_inp_shexp = matrix({{blk + "ffn_gate_inp_shexp", 1}}, hidden);
  m.ffn_gate_up_shexp = matrix({{blk + "ffn_gate_shexp", shared}, {blk + "ffn_up_shexp", shared}}, hidden);
  m.ffn_down_shexp = matrix({{blk + "ffn_down_shexp", hidden}}, shared);
  return m;
}

}  // namespace rvllm
