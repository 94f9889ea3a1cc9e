// Keys and values of the tokens so far. No STL here: the ISA files include it.
#pragma once

namespace rvllm {

// How a key or value element is kept. kQ8_0: int8 with a float scale for each block of them.
enum class KVType { kF16, kF32, kBF16, kQ8_0 };
constexpr int kNumKVTypes = 4;
constexpr int kKVScaleBlock = 32;  // elements of a head that share one scale
constexpr const char* kKVTypeNames[kNumKVTypes] = {"f16", "f32", "bf16", "q8_0"};

struct KVCacheSpec {
  int num_layers = 0;
  int num_blocks = 0;
  int block_size = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  KVType type = KVType::kF16;
};

// Of the layers of one group, which share their block tables.
class KVCache {
 public:
  virtual ~KVCache() = default;
  int group = 0;  // index into Batch::groups
};

}  // namespace rvllm
