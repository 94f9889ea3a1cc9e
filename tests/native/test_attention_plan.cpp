// Which partitions of the context requests share: results do not show it, since they are the same bits either way.
#include "cpu/attention_plan.h"
#include "kernel_cases.h"

namespace rvllm {
namespace {

constexpr int kBlockSize = 64, kBlocks = kPartition / kBlockSize;

// The number of spans of each unit of a step in which requests with these contexts decode. Their first `shared`
// partitions lie in the same blocks. There is one query head, and there are spans enough for one thread.
std::vector<int> shared_units(const std::vector<int>& contexts, int shared, int window) {
  const int num_requests = int(contexts.size()), max_blocks = 16 * kBlocks;
  std::vector<int32_t> positions, starts = {0}, tables;
  for (int r = 0; r < num_requests; ++r) {
    positions.push_back(contexts[size_t(r)] - 1);
    starts.push_back(r + 1);
    for (int b = 0; b < max_blocks; ++b) tables.push_back(b < shared * kBlocks ? b : (r + 1) * max_blocks + b);
  }
  Batch batch;
  batch.num_tokens = batch.num_requests = num_requests;
  batch.positions = positions.data();
  batch.query_start_loc = starts.data();
  batch.context_lens = contexts.data();
  BlockTables block_tables;
  block_tables.max_blocks = max_blocks;
  block_tables.block_tables = tables.data();
  AttentionParams params;
  params.num_heads = params.num_kv_heads = params.head_dim = 1;
  params.window = window;
  std::vector<int> sizes;
  for (const PartitionUnit& unit : AttentionPlan(batch, block_tables, kBlockSize, params, 1).units)
    sizes.push_back(unit.num_spans);
  return sizes;
}

void expect(const char* what, const std::vector<int>& got, const std::vector<int>& expected) {
  ++cases;
  if (got == expected) return;
  std::printf("attention plan: %s\n", what);
  ++failures;
}

}  // namespace

void test_attention_plan() {
  const int k = kPartition;
  expect("a prefix of two partitions", shared_units({3 * k, 3 * k, 3 * k, 3 * k}, 2, 0), {4, 4});
  expect("no partition is shared", shared_units({3 * k, 3 * k, 3 * k, 3 * k}, 0, 0), {});
  expect("one request is too short to share", shared_units({3 * k, 3 * k, 3 * k, 1}, 2, 0), {3, 3});
  expect("windows behind a short request", shared_units({9 * k, 9 * k, 9 * k, 1}, 9, 2 * k), {3, 3});
  expect("windows far from each other", shared_units({9 * k, 9 * k, 3 * k, 3 * k}, 9, 2 * k), {2, 2, 2, 2});
  expect("windows that overlap", shared_units({9 * k, 8 * k, 7 * k, 7 * k}, 9, 2 * k), {2, 3, 2});
}

}  // namespace rvllm
