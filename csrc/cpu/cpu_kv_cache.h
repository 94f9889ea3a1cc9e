// Keys and values in memory, block by block: [blocks, layers, KV heads, (keys, values)].
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/arena.h"
#include "cpu/kernels.h"
#include "kv_cache.h"

namespace rvllm {

class CpuKVCache final : public KVCache {
 public:
  explicit CpuKVCache(const KVCacheSpec& spec)
      : spec(spec), memory_(size_t(spec.num_blocks) * block_stride(spec)) {}

  static size_t head_bytes(const KVCacheSpec& s) {
    return 2 * size_t(kv_matrix_bytes(s.type, s.head_dim, s.block_size));
  }
  static size_t block_stride(const KVCacheSpec& s) {
    return size_t(s.num_layers) * size_t(s.num_kv_heads) * head_bytes(s);
  }

  int64_t block_stride() const { return int64_t(block_stride(spec)); }
  // Of block 0.
  uint8_t* head(int layer, int kv_head) const {
    return memory_.data() + size_t(layer * spec.num_kv_heads + kv_head) * head_bytes(spec);
  }

  const KVCacheSpec spec;

 private:
  HugePages memory_;  // comes to life when it is first written, zeroed: an idle cache costs nothing
};

}  // namespace rvllm
