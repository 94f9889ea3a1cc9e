// The kernels that tests/emu/metal_source.py has made C++ functions of, by their host names, and what a dispatch binds.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "emu/grid.h"

namespace rvllm::emu {

constexpr int kMaxBindings = 31;
constexpr size_t kMaxThreadgroupBytes = 32768;

struct Binding {
  void* data = nullptr;
  size_t bytes = 0;
};

// What a dispatch gives a kernel.
struct Bindings {
  Binding buffers[kMaxBindings];
  size_t threadgroup_bytes = 0;  // of threadgroup(0)
  int constants[8] = {-1, -1, -1, -1, -1, -1, -1, -1};  // of booleans; -1: not set
};

using KernelFunction = std::function<void(const Bindings&)>;
struct KernelRegistration {
  KernelRegistration(const char* name, unsigned most_threads, KernelFunction function);
};
bool has_kernel(const std::string& name);
unsigned most_threads(const std::string& name);  // of a group
bool uses_constants(const std::string& name);

// Runs the kernel; what it says is empty, or why it failed.
std::string dispatch_kernel(const std::string& name, const Bindings& bindings, Coord groups, Coord threads);

// RVLLM_EMU_ORDER, as the kernel that runs was started with.
unsigned schedule();

// A boolean that is fixed when a pipeline is made, read while its kernel runs.
struct FunctionConstant {
  int index;
  operator bool() const;
};
// Kernels of files that have function constants need their values.
struct ConstantUser {
  ConstantUser(const char* kernel);
};

// Parameters of a kernel, converted to what it declares.
struct BufferPointer {
  const Binding& binding;
  int index;
  template <class T>
  operator T*() const {
    if (!binding.data) kernel_error("buffer(%d) is not set", index);
    if (reinterpret_cast<uintptr_t>(binding.data) % alignof(T)) kernel_error("buffer(%d) is misaligned", index);
    return static_cast<T*>(binding.data);
  }
};
struct BufferReference {
  const Binding& binding;
  int index;
  template <class T>
  operator const T&() const {
    if (!binding.data) kernel_error("buffer(%d) is not set", index);
    if (binding.bytes != sizeof(T))
      kernel_error("buffer(%d) holds %zu bytes, the kernel reads %zu", index, binding.bytes, sizeof(T));
    return *static_cast<const T*>(binding.data);
  }
};
struct ThreadgroupPointer {
  size_t bytes;
  template <class T>
  operator T*() const {
    if (bytes == 0) kernel_error("threadgroup(0) has no length");
    return static_cast<T*>(dynamic_shared());
  }
};

}  // namespace rvllm::emu
