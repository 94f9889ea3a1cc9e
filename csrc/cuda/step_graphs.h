// The work of a step as a CUDA graph. Between begin and flush, operations are noted with all they depend on: addresses,
// sizes, scalars. The same list again means the same kernels on the same memory, so the second time it is captured, and
// from then on replayed: one launch in place of some hundred. What differs from step to step lies in device memory.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <unordered_map>
#include <vector>

#include "cuda/gpu.h"

namespace rvllm::cuda {

// A number that stands for a list of values.
class Signature {
 public:
  template <class... Values>
  explicit Signature(const Values&... values) {
    (add(values), ...);
  }
  void add(uint64_t value) {
    value_ = (value_ ^ value) * 0x9e3779b97f4a7c15u;
    value_ ^= value_ >> 29;
  }
  void add(int64_t value) { add(uint64_t(value)); }
  void add(int value) { add(uint64_t(value)); }
  void add(bool value) { add(uint64_t(value)); }
  void add(float value);
  void add(const void* pointer) { add(uint64_t(reinterpret_cast<uintptr_t>(pointer))); }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0x2545f4914f6cdd1du;
};

class StepGraphs {
 public:
  StepGraphs(cudaStream_t stream, bool enabled) : stream_(stream), enabled_(enabled) {}
  ~StepGraphs() { forget(); }
  StepGraphs(const StepGraphs&) = delete;

  void begin() {
    discard();
    is_noting_ = enabled_;
  }
  // Drops what a step that failed has left.
  void discard() {
    work_.clear();
    signature_ = Signature();
    is_noting_ = false;
  }
  // Runs the work, or notes it.
  void add(uint64_t signature, std::function<void()> work);
  // Says that the last work noted depends on more; how much has been noted so far.
  void extend(uint64_t signature) { signature_.add(signature); }
  size_t num_noted() const { return work_.size(); }
  // Runs what has been noted.
  void flush();
  void end() {
    flush();
    is_noting_ = false;
  }
  // Memory that graphs may use is about to go.
  void forget();
  int num_replayed() const { return num_replayed_; }

 private:
  struct Entry {
    cudaGraphExec_t graph = nullptr;  // null: seen once
    std::list<uint64_t>::iterator age;
  };
  void run();
  cudaGraphExec_t capture();

  cudaStream_t stream_;
  bool enabled_, is_noting_ = false;
  std::vector<std::function<void()>> work_;
  Signature signature_;
  std::unordered_map<uint64_t, Entry> entries_;
  std::list<uint64_t> ages_;  // latest first
  int num_replayed_ = 0;
};

}  // namespace rvllm::cuda
