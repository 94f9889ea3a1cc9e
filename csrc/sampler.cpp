#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace rvllm {
namespace {

constexpr int kMostByHeap = 1024;     // the largest values that are kept while all are looked at
constexpr int kFirstCandidates = 64;  // to try, and from which on sorting is fastest
constexpr double kGreedyTemperature = 1e-5;  // below it, logits / temperature leaves float32's range
constexpr int kLanes = 16;
constexpr char kNotFinite[] = "the model's logits are not finite numbers";

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): 53 random bits as [0, 1).
double philox_uniform(uint64_t seed, uint64_t position, uint32_t index) {
  uint32_t c[4] = {uint32_t(position), uint32_t(position >> 32), index, 0};
  uint32_t k[2] = {uint32_t(seed), uint32_t(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53) * c[0], b = uint64_t(0xCD9E8D57) * c[2];
    const uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ k[0], uint32_t(b),
                              uint32_t(a >> 32) ^ c[3] ^ k[1], uint32_t(a)};
    std::memcpy(c, next, sizeof c);
    k[0] += 0x9E3779B9;
    k[1] += 0xBB67AE85;
  }
  const uint64_t bits = uint64_t(c[0]) << 32 | c[1];
  return double(bits >> 11) * 0x1p-53;
}

// exp for x <= 0, without calls or branches, so that loops over a vocabulary become vector code on any machine.
inline float exp_negative(float x) {
  x = x < -87.0f ? -87.0f : x;
  const float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // rounds to a whole number
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  const int32_t bits = (int32_t(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return p * scale;
}

// Sum of exp((x - largest) * factor) in float lanes, which bounds the error; the lanes are added in double.
double sum_of_exp(const float* x, int n, float largest, float factor) {
  float lanes[kLanes] = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int j = 0; j < kLanes; ++j) lanes[j] += exp_negative((x[i + j] - largest) * factor);
  for (int j = 0; i + j < n; ++j) lanes[j] += exp_negative((x[i + j] - largest) * factor);
  double sum = 0;
  for (float lane : lanes) sum += lane;
  return sum;
}

// Position of the first of the largest; n if there is none above -inf.
int32_t argmax(const float* x, int n) {
  // The lanes find the value, a second pass its first position: both loops are vector code.
  float lanes[kLanes];
  std::fill(lanes, lanes + kLanes, -std::numeric_limits<float>::infinity());
  int i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int j = 0; j < kLanes; ++j) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
  for (int j = 0; i + j < n; ++j) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
  const float largest = *std::max_element(lanes, lanes + kLanes);
  return int32_t(std::find(x, x + n, largest) - x);
}

bool all_finite(const float* x, int n) {
  float lanes[kLanes] = {};  // 0 * x is 0, or NaN where x is no finite number
  int i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int j = 0; j < kLanes; ++j) lanes[j] += 0.0f * x[i + j];
  for (int j = 0; i + j < n; ++j) lanes[j] += 0.0f * x[i + j];
  float sum = 0;
  for (float lane : lanes) sum += lane;
  return sum == 0;
}

bool better(const std::pair<float, int32_t>& a, const std::pair<float, int32_t>& b) {
  return a.first != b.first ? a.first > b.first : a.second < b.second;
}

// The `count` largest of x with their positions, the largest first.
std::vector<std::pair<float, int32_t>> largest_of(const float* x, int n, size_t count) {
  std::vector<std::pair<float, int32_t>> heap;  // the least of them in front
  heap.reserve(count);
  for (int i = 0; i < n; ++i) {
    if (heap.size() == count) {
      if (count == 0 || !(x[i] > heap.front().first)) continue;
      std::pop_heap(heap.begin(), heap.end(), better);
      heap.pop_back();
    }
    heap.emplace_back(x[i], i);
    std::push_heap(heap.begin(), heap.end(), better);
  }
  std::sort_heap(heap.begin(), heap.end(), better);
  return heap;
}

// Leaves the likeliest candidates that make up top_p of the sum of all, in the order in which they were.
void keep_nucleus(std::vector<std::pair<float, int32_t>>& candidates, double top_p) {
  // Sums of whole numbers do not depend on how nth_element leaves its elements.
  const auto weight = [](const std::pair<float, int32_t>& candidate) { return uint64_t(candidate.first * 0x1p40f); };
  uint64_t total = 0, before = 0;
  for (const auto& candidate : candidates) total += weight(candidate);
  const double needed = top_p * double(total);
  thread_local std::vector<std::pair<float, int32_t>> order;
  order = candidates;
  auto begin = order.begin(), end = order.end();  // where the last of them is
  while (end - begin > kFirstCandidates) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, better);
    uint64_t sum = before;
    for (auto it = begin; it != middle; ++it) sum += weight(*it);
    if (double(sum) >= needed) {
      end = middle;
    } else {
      begin = middle;
      before = sum;
    }
  }
  std::sort(begin, end, better);
  auto last = begin;
  for (; last + 1 != end; ++last)
    if (double(before += weight(*last)) >= needed) break;
  const auto is_beyond = [&](const auto& candidate) { return better(*last, candidate); };
  candidates.erase(std::remove_if(candidates.begin(), candidates.end(), is_beyond), candidates.end());
}

// Leaves -inf for every token whose bit is not set, NaN or not; tokens beyond the words have none.
void mask_logits(float* logits, int n, const std::vector<int32_t>& words) {
  constexpr float kBanned = -std::numeric_limits<float>::infinity();
  for (int start = 0; start < n; start += 32) {
    const size_t w = size_t(start / 32);
    const uint32_t word = w < words.size() ? uint32_t(words[w]) : 0;
    const int stop = std::min(32, n - start);
    for (int i = 0; i < stop; ++i)
      if (!(word >> i & 1)) logits[start + i] = kBanned;
  }
}

}  // namespace

Sampler::Sampler(SamplerConfig config) : config_(std::move(config)) {
  if (config_.repetition_penalty != 1.0)
    for (int32_t id : config_.prompt_token_ids) counts_.emplace(id, 0);
  config_.prompt_token_ids.clear();
}

void check_logits(const float* logits, int n) {
  if (!all_finite(logits, n)) throw std::runtime_error(kNotFinite);
}

int32_t best_token(const float* logits, int n) { return all_finite(logits, n) ? argmax(logits, n) : -1; }

std::vector<Logprob> log_probabilities(const float* logits, int n, int32_t token_id, int num_best) {
  const float largest = logits[argmax(logits, n)];
  const double log_total = double(largest) + std::log(sum_of_exp(logits, n, largest, 1.0f));
  const float own = logits[token_id];
  int32_t rank = 1;
  for (int i = 0; i < n; ++i) rank += logits[i] > own || (logits[i] == own && i < token_id);
  std::vector<Logprob> entries{{token_id, float(double(own) - log_total), rank}};
  rank = 0;
  for (const auto& [logit, id] : largest_of(logits, n, size_t(std::min(num_best, n))))
    entries.push_back({id, float(double(logit) - log_total), ++rank});
  return entries;
}

bool Sampler::is_greedy() const {
  const SamplerConfig& c = config_;
  return (c.temperature < kGreedyTemperature || c.top_k == 1 || c.top_p <= 0) && c.num_logprobs < 0 &&
         c.repetition_penalty == 1 && c.presence_penalty == 0 && c.frequency_penalty == 0 && c.logit_bias.empty() &&
         (position_ >= uint64_t(c.min_tokens) || c.stop_token_ids.empty()) && allowed_.empty();
}

Sample Sampler::take_best(int32_t token_id) {
  if (token_id < 0) throw std::runtime_error(kNotFinite);
  ++position_;
  return {token_id, {}, {}};
}

Sample Sampler::sample(float* logits) {
  const SamplerConfig& c = config_;
  check_logits(logits, c.vocab_size);
  // What is changed below is kept, since the sampled token's log-probability is the model's own.
  std::vector<std::pair<int32_t, float>> changed;
  auto change = [&](int32_t id, float value) {
    changed.emplace_back(id, logits[id]);
    logits[id] = value;
  };
  const bool penalised = c.repetition_penalty != 1 || c.presence_penalty != 0 || c.frequency_penalty != 0;
  if (penalised)
    for (const auto& [id, count] : counts_) {
      double x = logits[id];
      x = x > 0 ? x / c.repetition_penalty : x * c.repetition_penalty;
      if (count > 0) x -= c.presence_penalty + c.frequency_penalty * count;
      constexpr double kLargest = std::numeric_limits<float>::max();  // an extreme penalty must not make infinities
      change(id, float(std::clamp(x, -kLargest, kLargest)));
    }
  for (const auto& [id, bias] : c.logit_bias) change(id, logits[id] + bias);
  if (position_ < uint64_t(c.min_tokens))
    for (int32_t id : c.stop_token_ids) change(id, -std::numeric_limits<float>::infinity());

  std::vector<float> before_mask;
  if (!allowed_.empty()) {
    if (c.num_logprobs >= 0) before_mask.assign(logits, logits + c.vocab_size);
    mask_logits(logits, c.vocab_size, allowed_);
    allowed_.clear();
  }

  Sample result;
  result.token_id = draw(logits);
  if (result.token_id < 0) throw std::runtime_error("no token is left to sample");
  if (c.num_logprobs >= 0) {
    std::copy(before_mask.begin(), before_mask.end(), logits);
    for (auto it = changed.rbegin(); it != changed.rend(); ++it) logits[it->first] = it->second;
    result.logprobs = log_probabilities(logits, c.vocab_size, result.token_id, c.num_logprobs);
  }
  if (penalised) ++counts_[result.token_id];
  ++position_;
  return result;
}

int32_t Sampler::draw(const float* logits) {
  const SamplerConfig& c = config_;
  const int n = c.vocab_size;
  const int32_t best = argmax(logits, n);
  if (best >= n || !std::isfinite(logits[best])) return -1;
  if (c.temperature < kGreedyTemperature || c.top_k == 1 || c.top_p <= 0) return best;

  const float largest = logits[best], factor = float(1.0 / c.temperature);
  const double uniform = philox_uniform(c.seed, position_, c.index);
  const bool limited_k = c.top_k > 0 && c.top_k < n;
  if (!limited_k && c.top_p >= 1 && c.min_p <= 0) {
    const double target = uniform * sum_of_exp(logits, n, largest, factor);
    double sum = 0;
    for (int i = 0; i < n; ++i) {
      sum += exp_negative((logits[i] - largest) * factor) * (logits[i] > -std::numeric_limits<float>::infinity());
      if (sum > target) return i;
    }
    return best;  // rounding left the target just beyond the sum
  }

  // Candidates with their probabilities relative to the best one's, 1.
  thread_local std::vector<std::pair<float, int32_t>> candidates;  // a thread's, for requests are many
  candidates.clear();
  const float threshold = c.min_p > 0 ? float(c.min_p) : 0.0f;
  const auto add = [&](float logit, int32_t id) {
    const float p = exp_negative((logit - largest) * factor);
    const bool is_one = p >= threshold && logit > -std::numeric_limits<float>::infinity();
    if (is_one) candidates.emplace_back(p, id);
    return is_one ? p : 0.0f;
  };
  bool is_nucleus = c.top_p >= 1;
  if (limited_k && c.top_k <= kMostByHeap) {  // the exponentials of all others would take most of the time
    for (const auto& [logit, id] : largest_of(logits, n, size_t(c.top_k))) add(logit, id);
  } else {
    if (!limited_k && c.min_p <= 0) {  // as a rule the nucleus is a few dozen tokens
      const double needed = c.top_p * sum_of_exp(logits, n, largest, factor);
      for (int count = kFirstCandidates; !is_nucleus && count <= std::min(n, kMostByHeap); count *= 16) {
        candidates.clear();
        double sum = 0;
        for (const auto& [logit, id] : largest_of(logits, n, size_t(count))) {
          sum += add(logit, id);
          is_nucleus = sum >= needed;
          if (is_nucleus) break;
        }
      }
    }
    if (!is_nucleus || limited_k || c.min_p > 0) {
      candidates.clear();
      for (int i = 0; i < n; ++i) add(logits[i], i);
    }
  }
  // Ordering by probability alone would tie tokens that the exponential rounds together; their ids break ties.
  if (limited_k && size_t(c.top_k) < candidates.size()) {
    std::nth_element(candidates.begin(), candidates.begin() + c.top_k, candidates.end(), better);
    candidates.resize(size_t(c.top_k));
  }
  if (!is_nucleus) keep_nucleus(candidates, c.top_p);
  // In id order, so that the draw does not depend on how the selection above left its elements.
  const auto by_id = [](const auto& a, const auto& b) { return a.second < b.second; };
  if (!std::is_sorted(candidates.begin(), candidates.end(), by_id))
    std::sort(candidates.begin(), candidates.end(), by_id);
  double total = 0;
  for (const auto& candidate : candidates) total += candidate.first;
  const double target = uniform * total;
  double sum = 0;
  for (const auto& [p, id] : candidates) {
    sum += p;
    if (sum > target) return id;
  }
  return candidates.back().second;
}

}  // namespace rvllm
