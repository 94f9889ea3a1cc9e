// The shared memory of the block that runs: named arrays and the launch's dynamic part, filled with NaN, each followed
// by a gap that AddressSanitizer sees.
#pragma once

#include <cstddef>
#include <unordered_map>

namespace rvllm::emu {

class SharedMemory {
 public:
  void begin_launch();
  void begin_block(size_t dynamic_bytes);
  char* dynamic() const { return dynamic_; }
  // The block's array of this key: the same for all its threads.
  char* array(const void* key, size_t bytes, size_t align);
  size_t bytes() const { return static_bytes_ + dynamic_bytes_; }

 private:
  struct Array {
    char* data = nullptr;
    unsigned long block = 0;
  };
  char* take(size_t bytes);

  char* arena_ = nullptr;
  size_t used_ = 0;
  char* dynamic_ = nullptr;
  size_t dynamic_bytes_ = 0, static_bytes_ = 0;
  unsigned long block_ = 0;
  std::unordered_map<const void*, Array> arrays_;
};

// Memory that no sanitizer has seen written: straight from the system.
char* map_memory(size_t bytes);
// Sets every byte to 0xFF, which makes floats NaN and indices -1, unseen by sanitizers.
void fill_invalid(void* data, size_t bytes);

}  // namespace rvllm::emu
