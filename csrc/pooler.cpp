#include "pooler.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "check.h"

namespace rvllm {

Pooler::Pooler(Pooling pooling, int hidden_size, int num_tokens)
    : pooling_(pooling), num_tokens_(num_tokens), sum_(size_t(std::max(hidden_size, 0))) {
  check(pooling >= Pooling::kMean && pooling <= Pooling::kLast, "[pooler] pooling type ", int(pooling),
        " is not 1 (mean), 2 (cls) or 3 (last)");
  check(hidden_size > 0 && num_tokens > 0, "[pooler] nothing to pool: ", num_tokens, " tokens of ", hidden_size);
}

void Pooler::add(const float* states, int64_t stride, int position, int count) {
  if (position == 0) {
    num_added_ = 0;
    std::fill(sum_.begin(), sum_.end(), 0.0);
  }
  check(position == num_added_ && position + count <= num_tokens_, "[pooler] positions ", position, " to ",
        position + count, " follow ", num_added_, " of ", num_tokens_);
  // Token by token in double, so that neither the sum nor its last bit depends on how a prompt was cut.
  for (int t = position; t < position + count; ++t, states += stride) {
    const bool counts = pooling_ == Pooling::kMean || (pooling_ == Pooling::kCls ? t == 0 : t == num_tokens_ - 1);
    if (!counts) continue;
    for (size_t i = 0; i < sum_.size(); ++i) sum_[i] += double(states[i]);
  }
  num_added_ += count;
}

std::vector<float> Pooler::embedding() const {
  check(num_added_ == num_tokens_, "[pooler] ", num_added_, " of ", num_tokens_, " tokens have been added");
  double squares = 0;  // the mean's divisor cancels
  for (double x : sum_) squares += x * x;
  if (!std::isfinite(squares)) throw std::runtime_error("the model's hidden states are not finite numbers");
  const double factor = squares > 0 ? 1 / std::sqrt(squares) : 0;
  std::vector<float> out;
  for (double x : sum_) out.push_back(float(x * factor));
  return out;
}

}  // namespace rvllm
