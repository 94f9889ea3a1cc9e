// One request's way from logits to a token. On the host, the same for every backend.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace rvllm {

struct SamplerConfig {
  int vocab_size = 0;
  double temperature = 1;      // 0: the best token
  double top_p = 1;
  int top_k = 0;               // 0: all
  double min_p = 0;
  double repetition_penalty = 1;
  double presence_penalty = 0;
  double frequency_penalty = 0;
  uint64_t seed = 0;
  uint32_t index = 0;          // which of the n choices of a prompt
  int min_tokens = 0;          // stop_token_ids are not sampled before this many tokens
  int num_logprobs = -1;       // -1: none; else the sampled token and so many of the best
  std::vector<int32_t> prompt_token_ids;
  std::vector<int32_t> stop_token_ids;
  std::vector<std::pair<int32_t, float>> logit_bias;
};

struct Logprob {
  int32_t token_id;
  float logprob;  // natural log of the model's own distribution: before temperature, penalties and bias
  int32_t rank;   // 1: most likely
};

struct Sample {
  int32_t token_id = -1;
  std::vector<Logprob> logprobs;  // the sampled token first, then the best ones
  std::string error;              // why there is no token
};

// Throws runtime_error when not all n logits are finite numbers.
void check_logits(const float* logits, int n);

// The first of the largest of n logits; -1 when not all are finite numbers.
int32_t best_token(const float* logits, int n);

// The entry of token_id, then the num_best most likely tokens.
std::vector<Logprob> log_probabilities(const float* logits, int n, int32_t token_id, int num_best);

class Sampler {
 public:
  explicit Sampler(SamplerConfig config);

  int vocab_size() const { return config_.vocab_size; }

  // Picks the next token from logits [vocab_size], which it may change, and counts it.
  // The choice depends on the logits, the seed and how many tokens came before: never on other requests.
  // Throws runtime_error when the logits are not finite numbers, or all tokens are banned.
  Sample sample(float* logits);

  // The next token is the best one of the model's own distribution, and nothing else is asked for.
  bool is_greedy() const;
  // Takes the token that sample would pick while is_greedy(); -1 stands for logits that are not finite numbers.
  Sample take_best(int32_t token_id);

  // The next token is one of those whose bit i % 32 of word i / 32 is set. Holds for one token.
  void set_allowed(std::vector<int32_t> words) { allowed_ = std::move(words); }

 private:
  int32_t draw(const float* logits);

  SamplerConfig config_;
  std::vector<int32_t> allowed_;                 // empty: all tokens
  std::unordered_map<int32_t, int32_t> counts_;  // tokens generated, and those of the prompt with count 0
  uint64_t position_ = 0;                        // tokens sampled so far
};

}  // namespace rvllm
