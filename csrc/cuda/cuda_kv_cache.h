// How keys and values lie on the device: [layers, blocks, KV heads], and of each head its keys, then its values.
//
// Keys of a block are [D / x, block_size, x] with x elements in 16 bytes: neighbouring threads, which take neighbouring
// positions, read neighbouring 16 bytes. Values are [block_size, D]. D is padded to whole x, with zeros in the keys.
// Behind the codes of kQ8_0 lie their scales, [ceil(D / 32), block_size] and [block_size, ceil(D / 32)] floats.
#pragma once

#include <cstdint>
#include <memory>

#include "kv_cache.h"

namespace rvllm {

constexpr int kv_element_bytes(KVType type) {
  return type == KVType::kF32 ? 4 : type == KVType::kQ8_0 ? 1 : 2;
}

struct KVLayout {
  KVType type = KVType::kF16;
  int num_blocks = 0, block_size = 0, num_kv_heads = 0, head_dim = 0;
  int padded_dim = 0;     // D in whole 16 bytes
  int scales = 0;         // of one position
  int64_t code_bytes = 0;    // of the keys, or the values, of a head in a block
  int64_t matrix_bytes = 0;  // with their scales
  int64_t block_bytes = 0;   // of all heads
  uint8_t* data = nullptr;

  KVLayout() = default;
  explicit KVLayout(const KVCacheSpec& spec)
      : type(spec.type), num_blocks(spec.num_blocks), block_size(spec.block_size), num_kv_heads(spec.num_kv_heads),
        head_dim(spec.head_dim) {
    const int x = 16 / kv_element_bytes(type);
    padded_dim = (head_dim + x - 1) / x * x;
    scales = type == KVType::kQ8_0 ? (head_dim + kKVScaleBlock - 1) / kKVScaleBlock : 0;
    code_bytes = int64_t(padded_dim) * block_size * kv_element_bytes(type);
    matrix_bytes = (code_bytes + 4 * int64_t(scales) * block_size + 15) / 16 * 16;
    block_bytes = 2 * matrix_bytes * num_kv_heads;
  }
  int64_t layer_bytes() const { return block_bytes * num_blocks; }
};

class CudaKVCache final : public KVCache {
 public:
  KVLayout layout;
  std::shared_ptr<void> memory;

  KVLayout layer(int index) const {
    KVLayout l = layout;
    l.data += index * layout.layer_bytes();
    return l;
  }
};

}  // namespace rvllm
