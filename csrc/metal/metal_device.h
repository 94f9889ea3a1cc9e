// Apple's Metal as plain C++: memory, kernels, and the command buffer that they are put into. All Objective-C is in
// metal_device.mm.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace rvllm {

// A kernel of the library as a row of the table of pipelines; some have a boolean that is fixed when they are compiled.
struct KernelRow {
  std::string name;
  std::string function;
  int constant = -1;  // index of the function constant; -1: none
  bool value = false;
  int threads = 256;  // of a group, at most
};

struct GridSize {
  int64_t x = 1, y = 1, z = 1;
};

class MetalDevice {
 public:
  // library: a .metallib, or a file with the source of all kernels, which is compiled now. Throws runtime_error when
  // there is no device or one that cannot run them, or saying which kernel the library lacks or cannot be made.
  MetalDevice(const std::string& library, const std::vector<KernelRow>& kernels);
  ~MetalDevice();

  std::string name() const;
  std::pair<size_t, size_t> memory_info() const;  // bytes free, and in all, of what Metal recommends to use

  // Memory that host and device share, or runtime_error with the bytes asked for and how many there are.
  std::shared_ptr<void> alloc(size_t bytes, const char* what);

  // Puts a kernel behind what was encoded so far. args become buffer 0, `buffers` those from 1 on: pointers into memory
  // of alloc, or null for what the kernel does not read. Threads: of a group.
  void encode(const std::string& kernel, GridSize groups, int threads, const void* args, size_t args_bytes,
              std::initializer_list<const void*> buffers, size_t threadgroup_bytes = 0);
  template <class Args>
  void encode(const std::string& kernel, GridSize groups, int threads, const Args& args,
              std::initializer_list<const void*> buffers, size_t threadgroup_bytes = 0) {
    encode(kernel, groups, threads, &args, sizeof args, buffers, threadgroup_bytes);
  }
  // out[m, n] = x[m, k] w[n, k]^T by MPSMatrixMultiplication; x and w are dense F16, rows of out lie out_stride floats
  // apart.
  void matmul_f16(float* out, int64_t out_stride, const void* x, const void* w, int64_t m, int64_t n, int64_t k);

  void commit();       // lets the device begin with what was encoded
  void synchronize();  // and waits for it; throws runtime_error with what Metal says of a failure

 private:
  struct State;
  std::shared_ptr<State> state_;  // memory may outlive the device
};

}  // namespace rvllm
