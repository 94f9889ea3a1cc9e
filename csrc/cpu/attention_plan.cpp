#include "cpu/attention_plan.h"

#include <algorithm>

namespace rvllm {

namespace {
// Beyond these, spans compute what is left of their partitions themselves: 136 MB with heads of 128.
constexpr int64_t kMaxKeptRows = 1 << 18;
}  // namespace

AttentionPlan::AttentionPlan(const Batch& batch, const BlockTables& tables, int block_size,
                             const AttentionParams& params, int num_threads)
    : num_heads(params.num_heads), num_kv_heads(params.num_kv_heads), window(params.window) {
  cut(batch);
  if (block_size <= kPartition && kPartition % block_size == 0) share(batch, tables, block_size);
  if (spans.size() >= size_t(4 * num_threads)) return;
  int64_t rows_each = 1;
  for (const AttentionSpan& span : spans) rows_each += span.num_rows();
  const int64_t most = (kMaxKeptRows - num_rows) / rows_each;  // partitions of each span
  for (int i = 0; i < int(spans.size()); ++i)
    for (int p = 0; p < std::min<int64_t>(most, spans[size_t(i)].num_partitions); ++p)
      if (rows[size_t(spans[size_t(i)].first_row + p)] < 0) add_unit(spans[size_t(i)].first_partition + p, &i, 1);
}

void AttentionPlan::cut(const Batch& batch) {
  const int group = num_heads / num_kv_heads;  // query heads of one KV head
  const int heads = std::min(group, kMaxQueryRows);
  const int tokens = kMaxQueryRows / heads;
  int64_t count = 0;
  for (int b = 0; b < batch.num_requests; ++b)
    for (int t = batch.query_start_loc[b]; t < batch.query_start_loc[b + 1]; t += tokens)
      for (int kv_head = 0; kv_head < num_kv_heads; ++kv_head)
        for (int h = 0; h < group; h += heads) {
          AttentionSpan span{b, kv_head, t, std::min(tokens, batch.query_start_loc[b + 1] - t),
                             kv_head * group + h, std::min(heads, group - h), 0, 0, count};
          span.first_partition = first_visible(batch, t) / kPartition;
          span.num_partitions = batch.positions[t + span.num_tokens - 1] / kPartition + 1 - span.first_partition;
          count += span.num_partitions;
          spans.push_back(span);
        }
  rows.assign(size_t(count), -1);
}

// Finds the decoding requests whose tables name the same blocks for a whole partition.
void AttentionPlan::share(const Batch& batch, const BlockTables& tables, int block_size) {
  std::vector<int> firsts;  // of the spans of each request with one token
  for (int i = 0; i < int(spans.size()); ++i) {
    const AttentionSpan& s = spans[size_t(i)];
    const bool alone = batch.query_start_loc[s.request + 1] - batch.query_start_loc[s.request] == 1;
    if (alone && s.first_head == 0 && 2 * s.num_heads <= kMaxQueryRows) firsts.push_back(i);
  }
  const int spans_each = num_heads / num_kv_heads > kMaxQueryRows ? 0 : num_kv_heads;
  const int blocks = kPartition / block_size;
  int partition = INT32_MAX, last_first = 0;
  for (const int i : firsts) {
    partition = std::min(partition, spans[size_t(i)].first_partition);
    last_first = std::max(last_first, spans[size_t(i)].first_partition);
  }
  std::vector<std::vector<int>> sharers;
  // Requests part for good: where all have begun and no two share a partition, they share none behind it.
  for (bool may_share = firsts.size() > 1 && spans_each > 0; may_share && num_rows < kMaxKeptRows; ++partition) {
    may_share = partition < last_first;
    sharers.clear();
    for (const int i : firsts) {
      const AttentionSpan& s = spans[size_t(i)];
      if (partition < s.first_partition || batch.positions[s.first_token] + 1 < (partition + 1) * kPartition) continue;
      const auto table = [&](int span) {
        return tables.block_tables + int64_t(spans[size_t(span)].request) * tables.max_blocks + partition * blocks;
      };
      const auto same = std::find_if(sharers.begin(), sharers.end(), [&](const std::vector<int>& group) {
        return std::equal(table(i), table(i) + blocks, table(group.front()));
      });
      if (same == sharers.end())
        sharers.push_back({i});
      else
        same->push_back(i);
    }
    for (std::vector<int>& group : sharers) {
      if (group.size() < 2) continue;
      may_share = true;
      const int most = kMaxQueryRows / spans[size_t(group.front())].num_heads;
      const int units_needed = (int(group.size()) + most - 1) / most;
      for (int head = 0; head < spans_each; ++head) {
        for (int u = 0, begin = 0; u < units_needed; ++u) {
          const int end = int(group.size()) * (u + 1) / units_needed;
          add_unit(partition, group.data() + begin, end - begin);
          begin = end;
        }
        for (int& span : group) ++span;  // the same requests' next KV head
      }
    }
  }
}

void AttentionPlan::add_unit(int partition, const int* span, int num_spans) {
  units.push_back({partition, int(unit_spans.size()), num_spans, num_rows});
  for (int i = 0; i < num_spans; ++i) {
    const AttentionSpan& s = spans[size_t(span[i])];
    unit_spans.push_back(span[i]);
    rows[size_t(s.first_row + partition - s.first_partition)] = num_rows;
    num_rows += s.num_rows();
  }
}

}  // namespace rvllm
