// Finds a model's tensors by name, checks their shapes, and has the backend load them.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "model.h"

namespace rvllm {

// Every function throws invalid_argument naming a tensor that is missing, misshapen or of an unsupported type.
class WeightLoader {
 public:
  using Parts = std::vector<std::pair<std::string, int64_t>>;  // names without .weight, and their rows

  WeightLoader(Backend& backend, const ModelConfig& config, const TensorSource& source)
      : backend_(backend), config_(config), source_(source) {}

  std::unique_ptr<Weight> vector(const std::string& name, int64_t cols);
  NormWeights norm(const std::string& name, int64_t cols, int64_t rows = 1);  // with a bias where LayerNorm has one
  NormWeights head_norm(const std::string& name, int heads);                  // of each query or key head
  // Matrices [rows, cols], stacked; their biases are used where the file has them.
  std::unique_ptr<Weight> matrix(const Parts& parts, int64_t cols);
  // Query, key and value; or gate and up: in one tensor, in this order, or in one each. blk: "blk.N."
  std::unique_ptr<Weight> attn_qkv(const std::string& blk);
  std::unique_ptr<Weight> ffn_gate_up(const std::string& blk);
  Mixture mixture(const std::string& blk);

  bool has(const std::string& name) const { return source_(name).has_value(); }

 private:
  HostTensor find(const std::string& name, int64_t rows, int64_t cols) const;
  // Of each expert, [experts, rows, cols] in the file; num_experts 0: one matrix.
  std::unique_ptr<Weight> stack(const Parts& parts, int64_t cols, int num_experts);

  Backend& backend_;
  const ModelConfig& config_;
  const TensorSource& source_;
};

}  // namespace rvllm
