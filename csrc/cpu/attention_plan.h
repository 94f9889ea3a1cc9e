// How a step's attention is cut into work for threads.
#pragma once

#include <cstdint>
#include <vector>

#include "backend.h"
#include "cpu/kernels.h"

namespace rvllm {

// Some tokens of one request times query heads of one KV head, and the partitions of the context that they see.
struct AttentionSpan {
  int request, kv_head, first_token, num_tokens, first_head, num_heads, first_partition, num_partitions;
  int64_t first_row;  // index into AttentionPlan::rows of its first partition
  int num_rows() const { return num_tokens * num_heads; }
};

// One partition for all spans of a list. They read the same blocks: of one request, or of several that share a prefix.
struct PartitionUnit {
  int partition, first_span, num_spans;  // of AttentionPlan::unit_spans
  int64_t first_row;                     // where its results lie
};

// Units run first, and their results are kept; each span then merges its partitions in ascending order, those that no
// unit has computed after computing them itself. Units are for partitions that requests share, and for all of them when
// there are too few spans to keep every thread busy.
struct AttentionPlan {
  AttentionPlan(const Batch& batch, const BlockTables& tables, int block_size, const AttentionParams& params,
                int num_threads);

  int first_visible(const Batch& batch, int token) const {
    return window > 0 && batch.positions[token] + 1 > window ? batch.positions[token] + 1 - window : 0;
  }

  int num_heads, num_kv_heads, window;
  std::vector<AttentionSpan> spans;
  std::vector<PartitionUnit> units;
  std::vector<int> unit_spans;
  std::vector<int64_t> rows;  // for each span and partition, the first row of its result, or -1 where no unit has it
  int64_t num_rows = 0;       // of results that are kept

 private:
  void cut(const Batch& batch);
  void share(const Batch& batch, const BlockTables& tables, int block_size);
  void add_unit(int partition, const int* span, int num_spans);
};

}  // namespace rvllm
