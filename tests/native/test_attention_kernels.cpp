// Keys and values stored in blocks, attention over them, and the merging of its partitions.
#include <utility>

#include "kernel_cases.h"

namespace rvllm {
namespace {

void test_store_kv() {
  for (int type = 0; type < kNumKVTypes; ++type)
    for (int head_dim : {1, 16, 20, 64, 80, 256, 8192})
      for (int block_size : {1, 8, 16, 24}) {
        const auto k = hostile(head_dim, 11), v = hostile(head_dim, 12), tiny = normals(head_dim, 13, 1e-38f);
        compare(named("store_kv type, head_dim, block_size", type, head_dim, block_size), [&](const Kernels& table) {
          auto block = output<uint8_t>(2 * kv_matrix_bytes(KVType(type), head_dim, block_size));
          table.store_kv[type](k.data(), v.data(), head_dim, block_size, block_size - 1, block.data());
          if (block_size > 2) table.store_kv[type](v.data(), k.data(), head_dim, block_size, 2, block.data());
          if (block_size > 2) table.store_kv[type](tiny.data(), k.data(), head_dim, block_size, 1, block.data());
          Bits bits;
          bits.add(block);
          return bits;
        });
      }
}

struct Part {
  std::vector<float> largest, total, values;

  Part(int rows, int head_dim)
      : largest(output(rows)), total(output(rows)), values(output(int64_t(rows) * padded_head_dim(head_dim))) {}
  AttentionPart view() { return {largest.data(), total.data(), values.data()}; }
  void add_to(Bits& bits) const {
    bits.add(largest);
    bits.add(total);
    bits.add(values);
  }
};

// exp of every difference of the largest scores, its cut-off at -87 too; a total of 0: there is nothing to add.
void test_merge() {
  const float scores[] = {0.0f, -87.0f, -87.00001f, -86.5f, 3.0f, 90.0f, 1e-20f, -1e30f};
  constexpr int kScores = 8;
  for (int head_dim : {1, 16, 40})
    for (int shift = 0; shift < kScores; ++shift)
      compare(named("merge_partition head_dim, shift", head_dim, shift), [&](const Kernels& table) {
        Part part(kMaxQueryRows, head_dim), sum(kMaxQueryRows, head_dim);
        for (int r = 0; r < kMaxQueryRows; ++r) {
          part.largest[size_t(r)] = scores[r % kScores];
          sum.largest[size_t(r)] = scores[(r + shift) % kScores];
          part.total[size_t(r)] = r / kScores == 1 ? 0.0f : float(r + 1);
          sum.total[size_t(r)] = r / kScores == 2 ? 0.0f : float(r + 2);
        }
        const int count = kMaxQueryRows * padded_head_dim(head_dim);
        part.values = hostile(count, 14);
        sum.values = normals(count + kGuard, 15);
        table.merge_partition(kMaxQueryRows, head_dim, part.view(), sum.view());
        Bits bits;
        sum.add_to(bits);
        return bits;
      });
}

// Row r sees `window` positions up to context - 1 - r % 7; queries grow with r, so that softmax turns sharp.
void test_attention_case(KVType type, int head_dim, int block_size, int context, int window, int rows, float soft_cap) {
  const int blocks = (context + block_size - 1) / block_size;
  const int64_t block_bytes = 2 * kv_matrix_bytes(type, head_dim, block_size);
  const int64_t run_stride = kRunBlocks * block_bytes + 8;
  Random random(uint64_t(head_dim * block_size + context));
  std::vector<int32_t> block_table;
  for (int b = 0; b < blocks; ++b) block_table.push_back(b + 1);
  for (int b = blocks - 1; b > 0; --b) std::swap(block_table[size_t(b)], block_table[size_t(random.below(b + 1))]);
  // Positions past the context are never written: whatever lies there must not matter.
  std::vector<uint8_t> cache(size_t(run_stride * (blocks / kRunBlocks + 1)), 0x7e);
  const HeadBlocks head{cache.data(), block_bytes, run_stride};
  const auto keys = normals(context * head_dim, 16), values = normals(context * head_dim, 17);
  for (int p = 0; p < context; ++p)
    kernels_scalar().store_kv[int(type)](keys.data() + p * head_dim, values.data() + p * head_dim, head_dim,
                                         block_size, p % block_size,
                                         head.block(block_table[size_t(p / block_size)]));
  const auto q = normals(rows * head_dim, 13, 2.0f);

  AttentionArgs args{};
  args.rows = rows;
  args.head_dim = head_dim;
  args.block_size = block_size;
  args.block_table = block_table.data();
  args.cache = head;
  args.scale = 0.25f;
  args.soft_cap = soft_cap;
  for (int r = 0; r < rows; ++r) {
    args.q[r] = q.data() + r * head_dim;
    args.last[r] = context - r % 7 > 1 ? context - r % 7 : 1;
    args.first[r] = window && args.last[r] > window ? args.last[r] - window : 0;
  }
  int first = args.first[0], last = args.last[0];
  for (int r = 1; r < rows; ++r) {
    first = args.first[r] < first ? args.first[r] : first;
    last = args.last[r] > last ? args.last[r] : last;
  }
  compare(named("attention type, head_dim, block_size, context, window, rows", int(type), head_dim, block_size, context,
                window, rows),
          [&](const Kernels& table) {
            Part part(rows, head_dim), sum(rows, head_dim);
            for (int r = 0; r < rows; ++r) sum.total[size_t(r)] = 0.0f;
            Bits bits;
            for (int begin = first / kPartition * kPartition; begin < last; begin += kPartition) {
              table.attend_partition[int(type)](args, begin, part.view());
              part.add_to(bits);
              table.merge_partition(rows, head_dim, part.view(), sum.view());
              sum.add_to(bits);
            }
            return bits;
          });
}

void test_attention() {
  for (int type = 0; type < kNumKVTypes; ++type) {
    const KVType kv = KVType(type);
    for (int head_dim : {8, 20, 64, 80, 256})
      for (int block_size : {8, 16, 24, 32})
        for (int context : {1, 17, 255, 600})
          for (int window : {0, 5, 300})
            for (int rows : {1, 7})
              if (kv == KVType::kF16 || (rows == 7 && window != 5))
                test_attention_case(kv, head_dim, block_size, context, window, rows, 0.0f);
    for (int rows : {2, 3, 4, 8, kMaxQueryRows})
      for (float soft_cap : {0.0f, 50.0f}) test_attention_case(kv, 64, 16, 300, 0, rows, soft_cap);
  }
}

}  // namespace

void test_attention_kernels() {
  test_store_kv();
  test_merge();
  test_attention();
}

}  // namespace rvllm
