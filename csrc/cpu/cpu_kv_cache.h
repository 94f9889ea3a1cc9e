// Keys and values in memory: [blocks / kRunBlocks, layers, KV heads, kRunBlocks, (keys, values)].
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
      : spec(spec), memory_(size_t((spec.num_blocks + kRunBlocks - 1) / kRunBlocks) * kRunBlocks * block_bytes(spec)) {}

  static size_t head_bytes(const KVCacheSpec& s) {
    return 2 * size_t(kv_matrix_bytes(s.type, s.head_dim, s.block_size));
  }
  // Of all layers and heads.
  static size_t block_bytes(const KVCacheSpec& s) {
    return size_t(s.num_layers) * size_t(s.num_kv_heads) * head_bytes(s);
  }

  HeadBlocks head(int layer, int kv_head) const {
    const size_t bytes = head_bytes(spec);
    return {memory_.data() + size_t(layer * spec.num_kv_heads + kv_head) * kRunBlocks * bytes, int64_t(bytes),
            int64_t(kRunBlocks * block_bytes(spec))};
  }

  const KVCacheSpec spec;

 private:
  HugePages memory_;  // comes to life when it is first written, zeroed: an idle cache costs nothing
};

}  // namespace rvllm
