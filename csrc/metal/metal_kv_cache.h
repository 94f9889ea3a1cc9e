#pragma once

#include <memory>

#include "cuda/cuda_kv_cache.h"
#include "metal/kernel_args.h"

namespace rvllm {

// Keys and values as on CUDA.
class MetalKVCache final : public KVCache {
 public:
  KVLayout layout;
  std::shared_ptr<void> memory;

  CacheArgs args() const {
    return {layout.code_bytes, layout.matrix_bytes, layout.block_bytes, layout.block_size,
            layout.head_dim,   layout.padded_dim,   layout.scales};
  }
  const uint8_t* layer(int index) const { return static_cast<uint8_t*>(memory.get()) + index * layout.layer_bytes(); }
};

}  // namespace rvllm
