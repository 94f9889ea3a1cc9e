// Which rows each expert multiplies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace rvllm {

// Rows [first, first + count) of an input, which one expert multiplies.
struct ExpertRows {
  int expert, first, count;
};

// The choices of all tokens, and a row for each of them. Rows are sorted by expert, so that each expert's weights are
// read once, and within an expert by token.
struct ExpertPlan {
  // Room for the choices of num_tokens tokens.
  void resize(int64_t num_tokens, int num_used);
  // Gives each choice its row.
  void sort(int num_experts);

  int num_used = 0;                // k
  std::vector<int32_t> experts;    // [T, k], best first
  std::vector<float> weights;      // [T, k]
  std::vector<int32_t> rows;       // [T, k]
  std::vector<int32_t> tokens;     // [T * k], of each row
  std::vector<ExpertRows> groups;  // of experts that have rows
};

}  // namespace rvllm
