#include "cpu/expert_plan.h"

namespace rvllm {

void ExpertPlan::resize(int64_t num_tokens, int k) {
  num_used = k;
  const size_t size = size_t(num_tokens * k);
  experts.resize(size);
  weights.resize(size);
  rows.resize(size);
  tokens.resize(size);
}

void ExpertPlan::sort(int num_experts) {
  std::vector<int> next(size_t(num_experts) + 1, 0);  // row of an expert's next choice
  for (int32_t e : experts) ++next[size_t(e) + 1];
  groups.clear();
  for (int e = 0; e < num_experts; ++e) {
    const int count = next[size_t(e) + 1];
    if (count > 0) groups.push_back({e, next[size_t(e)], count});
    next[size_t(e) + 1] += next[size_t(e)];
  }
  for (size_t i = 0; i < experts.size(); ++i) {
    rows[i] = next[size_t(experts[i])]++;
    tokens[size_t(rows[i])] = int32_t(i) / num_used;
  }
}

}  // namespace rvllm
