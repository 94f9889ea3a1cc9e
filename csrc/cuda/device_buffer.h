// Memory of the device, and pinned memory of the host.
#pragma once

#include <cstddef>
#include <memory>

#include "cuda/gpu.h"

namespace rvllm::cuda {

inline std::shared_ptr<void> device_memory(size_t bytes, const char* what) {
  return std::shared_ptr<void>(device_malloc(bytes, what), [](void* p) { cudaFree(p); });
}

// Copies up and waits: cudaMemcpy returns once it has read pageable memory, and other streams do not wait for the rest.
inline void copy_to_device(void* to, const void* from, size_t bytes, const char* what) {
  check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), what);
  check_cuda(cudaStreamSynchronize(nullptr), what);
}

// A stream that does not wait for the default one; it ends when its work has.
class Stream {
 public:
  Stream() { check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream"); }
  ~Stream() {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  Stream(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// Pinned memory through which data goes up: a copy that is under way keeps its part until the stream has been waited
// for.
class Staging {
 public:
  explicit Staging(cudaStream_t stream) : stream_(stream) {}

  void* take(size_t bytes) {
    bytes = (bytes + 15) / 16 * 16;
    if (used_ + bytes > capacity_) {
      check_cuda(cudaStreamSynchronize(stream_), "waiting for copies");
      used_ = 0;
      if (bytes > capacity_) grow(bytes);
    }
    void* const p = static_cast<char*>(memory_.get()) + used_;
    used_ += bytes;
    return p;
  }
  void synchronized() { used_ = 0; }

 private:
  void grow(size_t bytes) {
    const size_t capacity = 2 * bytes > kLeastBytes ? 2 * bytes : kLeastBytes;
    void* p = nullptr;
    check_cuda(cudaMallocHost(&p, capacity), "allocating pinned memory");
    capacity_ = capacity;
    memory_ = std::shared_ptr<void>(p, [](void* q) { cudaFreeHost(q); });
  }
  static constexpr size_t kLeastBytes = size_t(1) << 20;

  cudaStream_t stream_;
  std::shared_ptr<void> memory_;
  size_t capacity_ = 0, used_ = 0;
};

}  // namespace rvllm::cuda
