// A launch: checked at once as the runtime does, run when its stream comes to it.
#pragma once

#include <string>
#include <tuple>
#include <utility>

#include "emu/cuda/device_code.h"
#include "emu/cuda/runtime_api.h"

namespace rvllm::emu {

// A grid that remembers the line of the launch, for reports.
struct LaunchGrid : dim3 {
  LaunchGrid(dim3 grid, const char* file = __builtin_FILE(), int line = __builtin_LINE())
      : dim3(grid), file(file), line(line) {}
  LaunchGrid(unsigned x, const char* file = __builtin_FILE(), int line = __builtin_LINE())
      : dim3(x), file(file), line(line) {}
  LaunchGrid(int x, const char* file = __builtin_FILE(), int line = __builtin_LINE())
      : dim3(unsigned(x)), file(file), line(line) {}
  LaunchGrid(long x, const char* file = __builtin_FILE(), int line = __builtin_LINE())
      : dim3(unsigned(x)), file(file), line(line) {}
  const char* file;
  int line;
};

// cudaErrorInvalidConfiguration, cudaErrorInvalidValue (shared memory), or success; `config` gets the rest.
// cudaErrorInvalidResourceHandle: the stream is another device's than the thread has selected.
cudaError_t check_launch(const void* kernel, const LaunchGrid& grid, dim3 block, size_t shared_bytes,
                         cudaStream_t stream, GridConfig& config);

template <class... P, class... A>
cudaError_t launch_kernel(void (*kernel)(P...), const LaunchGrid& grid, dim3 block, size_t shared_bytes,
                          cudaStream_t stream, A&&... args) {
  GridConfig config;
  const cudaError_t error =
      check_launch(reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, stream, config);
  if (error != cudaSuccess) return error;
  const std::tuple<P...> values(std::forward<A>(args)...);
  return enqueue(stream, [=] {
    return run_grid(config, [&] { std::apply(kernel, values); }) ? cudaSuccess : cudaErrorLaunchFailure;
  });
}

}  // namespace rvllm::emu
