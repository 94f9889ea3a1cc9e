#include "cuda/gpu.h"

#include <cstdio>
#include <cstdlib>
#include <stdexcept>

namespace rvllm {
namespace {

std::string cuda_version(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// Without any driver the runtime says "insufficient driver", not "no device".
std::string driver_message() {
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  if (driver == 0) return "no NVIDIA driver is installed";
  return "the driver is for CUDA " + cuda_version(driver) + ", and rvllm was built with CUDA " + cuda_version(runtime) +
         ": install a newer one";
}

std::string reason(cudaError_t error) {
  switch (error) {
    case cudaErrorInsufficientDriver:
      return driver_message();
    case cudaErrorNoDevice: {
      const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
      return "the NVIDIA driver finds no CUDA device" +
             (visible ? " (CUDA_VISIBLE_DEVICES is '" + std::string(visible) + "')" : std::string());
    }
    default:
      return std::string(cudaGetErrorString(error)) + " (" + cudaGetErrorName(error) + ")";
  }
}

}  // namespace

std::string format_bytes(size_t bytes) {
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB"};
  double value = double(bytes) / 1024;
  int unit = 0;
  for (; value >= 1024 && unit < 2; ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, "%.1f %s", value, kUnits[unit]);
  return text;
}

void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // what was reported here must not fail the next call
  throw std::runtime_error("[cuda] " + std::string(what) + ": " + reason(error));
}

void require_device(int device) {
  int count = 0;
  check_cuda(cudaGetDeviceCount(&count), "looking for a device");
  if (device < 0 || device >= count)
    throw std::runtime_error("[cuda] there is no device " + std::to_string(device) + ": this machine has " +
                             std::to_string(count));
  check_cuda(cudaSetDevice(device), "selecting the device");
}

void* device_malloc(size_t bytes, const char* what) {
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    throw std::runtime_error("[cuda] too little device memory for " + std::string(what) + ": " + format_bytes(bytes) +
                             " asked for, " + format_bytes(free) + " of " + format_bytes(total) + " free");
  }
  check_cuda(error, what);
  return data;
}

}  // namespace rvllm
