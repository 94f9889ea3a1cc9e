// Memory for weights and for the KV cache, in huge pages where the system has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace rvllm {

// With pages of 4 KiB the processor spends a good part of its time on address translation. Memory is zeroed, aligned to
// 2 MiB, and resident when it is first written.
class HugePages {
 public:
  explicit HugePages(size_t bytes);  // throws bad_alloc
  ~HugePages();
  HugePages(HugePages&& other) noexcept
      : mapping_(std::exchange(other.mapping_, nullptr)), mapping_bytes_(other.mapping_bytes_), data_(other.data_) {}
  HugePages& operator=(HugePages&&) = delete;

  uint8_t* data() const { return data_; }

 private:
  void* mapping_;
  size_t mapping_bytes_;
  uint8_t* data_;
};

// Pieces of memory that are never freed one by one.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;

  // Memory aligned to 64 bytes and zeroed; lives as long as the arena. Throws bad_alloc.
  uint8_t* take(size_t bytes);

 private:
  std::vector<HugePages> pages_;
  uint8_t* next_ = nullptr;
  size_t left_ = 0;
};

}  // namespace rvllm
