// A step's int32 arrays as a GPU takes them: in one piece of memory, each from a multiple of 16 bytes on, at a place
// that depends on the shape of the batch alone.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "backend.h"

namespace rvllm {

constexpr int kPartition = 256;  // positions that attention works on at a time, merged in ascending order as on the CPU

inline int64_t power_of_two(int64_t at_least) {
  int64_t n = 1;
  while (n < at_least) n *= 2;
  return n;
}

// Neighbouring tokens of one request, which attention works on together.
struct AttentionUnit {
  int first_token, num_tokens, request, padding;
};

class StepArrays {
 public:
  struct Tables {
    const int *slot_mapping, *block_tables;
    int max_blocks;  // a power of two; what the batch has fewer of is never read
  };
  struct Units {
    int tokens;  // of a unit, at most
    int count;
    const AttentionUnit* data;
  };
  const int *input_ids = nullptr, *positions = nullptr, *logits_indices = nullptr;
  std::vector<Tables> groups;

  StepArrays() = default;
  // max_query_rows: query rows (tokens x heads of one KV head) that share reads of keys and values.
  StepArrays(const Batch& batch, int max_query_rows) : max_query_rows_(max_query_rows) {
    const int64_t tokens = batch.num_tokens, requests = batch.num_requests;
    put(batch.input_ids, tokens);
    put(batch.positions, tokens);
    put(batch.logits_indices, batch.num_logits);
    for (const BlockTables& g : batch.groups) {
      const int64_t width = power_of_two(g.max_blocks);
      put(g.slot_mapping, tokens);
      put(nullptr, requests * width);
      for (int64_t r = 0; r < requests && g.max_blocks > 0; ++r)
        std::memcpy(host_.data() + at_.back() + r * width, g.block_tables + r * g.max_blocks,
                    size_t(g.max_blocks) * sizeof(int));
      groups.push_back({nullptr, nullptr, int(width)});
    }
    for (int64_t r = 0; r < requests; ++r)
      max_partitions_ = std::max<int64_t>(max_partitions_, (batch.context_lens[r] + kPartition - 1) / kPartition);
    const bool decodes = tokens == requests;  // each request has one token
    for (int size = 1; requests > 0 && size <= (decodes ? 1 : max_query_rows); size *= 2) {
      std::vector<AttentionUnit> units;
      for (int r = 0; r < batch.num_requests; ++r)
        for (int t = batch.query_start_loc[r]; t < batch.query_start_loc[r + 1]; t += size)
          units.push_back({t, std::min(size, batch.query_start_loc[r + 1] - t), r, 0});
      put(reinterpret_cast<const int*>(units.data()), int64_t(units.size()) * 4);
      units_.push_back({size, int(units.size()), nullptr});
    }
    host_.resize(host_.size() + 4);  // so that an empty array at the end has an address
  }

  // What is to be copied to the device, and where the copy lies.
  const void* data() const { return host_.data(); }
  size_t bytes() const { return host_.size() * sizeof(int); }
  void place(const int* base) {
    size_t next = 0;
    const auto take = [&] { return base + at_[next++]; };
    input_ids = take();
    positions = take();
    logits_indices = take();
    for (Tables& t : groups) {
      t.slot_mapping = take();
      t.block_tables = take();
    }
    for (Units& u : units_) u.data = reinterpret_cast<const AttentionUnit*>(take());
  }

  // The largest units whose query rows, of so many heads a token, are not too many.
  const Units& units(int heads) const {
    const Units* best = &units_.front();
    for (const Units& u : units_)
      if (u.tokens * heads <= max_query_rows_) best = &u;
    return *best;
  }
  // The most partitions that a token sees through a window; 0: all of its context.
  int64_t partitions(int window) const {
    if (window <= 0) return max_partitions_;
    return std::min<int64_t>(max_partitions_, (window + kPartition - 2) / kPartition + 1);
  }

 private:
  void put(const int* values, int64_t count) {
    at_.push_back((host_.size() + 3) / 4 * 4);
    host_.resize(at_.back() + size_t(count));
    if (count > 0 && values) std::memcpy(host_.data() + at_.back(), values, size_t(count) * sizeof(int));
  }

  int max_query_rows_ = 1;
  int64_t max_partitions_ = 1;  // of a request's context
  std::vector<Units> units_;    // by tokens of a unit, ascending
  std::vector<int> host_;
  std::vector<size_t> at_;  // where each array begins
};

}  // namespace rvllm
