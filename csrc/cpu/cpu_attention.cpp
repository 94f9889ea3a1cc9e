#include <algorithm>

#include "cpu/cpu_backend.h"
#include "cpu/cpu_kv_cache.h"
#include "cpu/cpu_weight.h"

namespace rvllm {

const AttentionPlan& CpuBackend::attention_plan(const AttentionParams& params, const BlockTables& tables,
                                                int block_size) {
  for (const AttentionPlan& plan : attention_plans_)
    if (plan.num_heads == params.num_heads && plan.num_kv_heads == params.num_kv_heads && plan.window == params.window)
      return plan;
  return attention_plans_.emplace_back(*batch_, tables, block_size, params, pool_.size());
}

void CpuBackend::paged_attention(Tensor out, Tensor q, const KVCache& cache, int layer,
                                 const AttentionParams& params) {
  const auto& kv = static_cast<const CpuKVCache&>(cache);
  const Batch& batch = *batch_;
  const BlockTables& tables = batch.groups[size_t(kv.group)];
  const AttentionPlan& plan = attention_plan(params, tables, kv.spec.block_size);
  const auto attend = kernels_.attend_partition[int(kv.spec.type)];
  const int d = params.head_dim;
  const int64_t padded_dim = padded_head_dim(d);
  const float* const sinks = params.sinks ? static_cast<const CpuVector*>(params.sinks)->values.data() : nullptr;
  const int64_t total_rows = plan.num_rows + int64_t(2) * pool_.size() * kMaxQueryRows;
  if (int64_t(attention_rows_.size()) < total_rows * (2 + padded_dim))
    attention_rows_.resize(size_t(total_rows * (2 + padded_dim)));
  const auto part = [&](int64_t row) {
    float* const p = attention_rows_.data();
    return AttentionPart{p + row, p + total_rows + row, p + 2 * total_rows + row * padded_dim};
  };
  const auto begin_args = [&](const AttentionSpan& span) {
    AttentionArgs args;
    args.rows = 0;
    args.head_dim = d;
    args.block_size = kv.spec.block_size;
    args.block_table = tables.block_tables + int64_t(span.request) * tables.max_blocks;
    args.cache = kv.head(layer, span.kv_head);
    args.scale = params.scale;
    args.soft_cap = params.soft_cap;
    return args;
  };
  const auto add_rows = [&](AttentionArgs& args, const AttentionSpan& span) {
    for (int t = span.first_token; t < span.first_token + span.num_tokens; ++t)
      for (int h = span.first_head; h < span.first_head + span.num_heads; ++h, ++args.rows) {
        args.q[args.rows] = q.row(t) + int64_t(h) * d;
        args.first[args.rows] = plan.first_visible(batch, t);
        args.last[args.rows] = batch.positions[t] + 1;
      }
  };

  pool_.parallel_for(int64_t(plan.units.size()), 1, [&](int64_t begin, int64_t, int) {
    const PartitionUnit& unit = plan.units[size_t(begin)];
    const int* const spans = plan.unit_spans.data() + unit.first_span;
    AttentionArgs args = begin_args(plan.spans[size_t(spans[0])]);
    for (int i = 0; i < unit.num_spans; ++i) add_rows(args, plan.spans[size_t(spans[i])]);
    attend(args, unit.partition * kPartition, part(unit.first_row));
  });

  pool_.parallel_for(int64_t(plan.spans.size()), 1, [&](int64_t begin, int64_t, int thread) {
    const AttentionSpan& span = plan.spans[size_t(begin)];
    const int64_t scratch = plan.num_rows + int64_t(2) * thread * kMaxQueryRows;
    const int rows = span.num_rows();
    AttentionArgs args = begin_args(span);
    add_rows(args, span);
    AttentionPart sum;  // begins as the first partition
    for (int i = 0; i < span.num_partitions; ++i) {
      const int64_t kept = plan.rows[size_t(span.first_row + i)];
      const AttentionPart next = part(kept >= 0 ? kept : scratch + (i == 0 ? 0 : kMaxQueryRows));
      if (kept < 0) attend(args, (span.first_partition + i) * kPartition, next);
      if (i == 0)
        sum = next;
      else
        kernels_.merge_partition(rows, d, next, sum);
    }
    if (sinks) {  // merged last, as a partition of one position whose value is zero
      const AttentionPart sink = part(scratch + kMaxQueryRows);
      for (int r = 0; r < rows; ++r) {
        sink.largest[r] = sinks[span.first_head + r % span.num_heads];
        sink.total[r] = 1.0f;
      }
      std::fill_n(sink.values, rows * padded_dim, 0.0f);
      kernels_.merge_partition(rows, d, sink, sum);
    }
    int r = 0;
    for (int t = span.first_token; t < span.first_token + span.num_tokens; ++t)
      for (int h = span.first_head; h < span.first_head + span.num_heads; ++h, ++r) {
        const float inverse = 1.0f / sum.total[r];
        const float* values = sum.values + r * padded_dim;
        for (int i = 0; i < d; ++i) out.row(t)[int64_t(h) * d + i] = values[i] * inverse;
      }
  });
}

}  // namespace rvllm
