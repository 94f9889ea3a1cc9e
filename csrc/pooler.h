// One request's way from the final hidden states of its tokens to an embedding, on the host for every backend.
#pragma once

#include <cstdint>
#include <vector>

namespace rvllm {

enum class Pooling { kMean = 1, kCls = 2, kLast = 3 };  // numbered as in GGUF's pooling_type

class Pooler {
 public:
  Pooler(Pooling pooling, int hidden_size, int num_tokens);

  int hidden_size() const { return int(sum_.size()); }

  // Takes the states of tokens at consecutive positions, in order of positions; position 0 begins anew.
  void add(const float* states, int64_t stride, int position, int count);

  // The embedding, of length 1. Throws runtime_error when states are missing or no finite numbers.
  std::vector<float> embedding() const;

 private:
  Pooling pooling_;
  int num_tokens_;
  int num_added_ = 0;
  std::vector<double> sum_;  // over the tokens that count
};

}  // namespace rvllm
