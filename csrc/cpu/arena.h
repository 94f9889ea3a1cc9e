// Memory for weights: never freed one by one, in mappings large enough for huge pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace rvllm {

// Weights are read from end to end for every token; with pages of 4 KiB the processor spends a good part of that on
// address translation. Pages become resident when they are first written.
class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;

  // Memory aligned to 64 bytes and zeroed; lives as long as the arena. Throws bad_alloc.
  uint8_t* take(size_t bytes);

 private:
  struct Mapping {
    void* address;
    size_t bytes;
  };
  std::vector<Mapping> mappings_;
  uint8_t* next_ = nullptr;
  size_t left_ = 0;
};

}  // namespace rvllm
