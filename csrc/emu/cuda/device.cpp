// The emulated device, errors, and the check of a launch.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "cuda_fp16.h"
#include "emu/cuda/runtime_state.h"

namespace rvllm::emu {
namespace {

// Of compute capability 8.0; the limits are those of the smallest such device.
constexpr int kMajor = 8, kMinor = 0, kMultiprocessors = 4, kL2Bytes = 4 << 20;
constexpr size_t kSharedBytes = size_t(48) << 10, kSharedBytesOptin = size_t(99) << 10;
constexpr int kCudaVersion = 13000;

cudaError_t g_last = cudaSuccess;
bool g_failed = false;
thread_local int g_device = 0;  // as CUDA has it: of each thread
std::map<const void*, int> g_dynamic_shared_limit;

int num_devices() { return setting("RVLLM_EMU_DEVICES", 1); }
bool exists(int device) { return device >= 0 && device < num_devices(); }

const float* make_half_values() {
  static float values[65536];
  for (uint32_t i = 0; i < 65536; ++i) {
    const uint32_t sign = (i & 0x8000) << 16, exponent = i >> 10 & 31, fraction = i & 1023;
    uint32_t bits = sign;
    if (exponent == 31)
      bits |= 0x7f800000 | fraction << 13;
    else if (exponent > 0)
      bits |= (exponent + 112) << 23 | fraction << 13;
    else
      bits |= rv_emu_bits<uint32_t>(std::ldexp(float(fraction), -24));
    values[i] = rv_emu_bits<float>(bits);
  }
  return values;
}

}  // namespace

const float* const half_values = make_half_values();

uint16_t half_bits(float f) {
  const uint32_t bits = rv_emu_bits<uint32_t>(f);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7fff;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // rounds to infinity
  if (magnitude < 0x38800000)  // subnormal: adding 0.5 rounds at the right place
    return sign | uint16_t(rv_emu_bits<uint32_t>(rv_emu_bits<float>(magnitude) + 0.5f) - 0x3f000000);
  magnitude += 0xc8000fff + (magnitude >> 13 & 1);
  return sign | uint16_t(magnitude >> 13);
}

int setting(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atoi(text) : otherwise;
}

int current_device() { return g_device; }

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) g_last = error;
  if (error == cudaErrorLaunchFailure) g_failed = true;
  return error;
}

bool failed_for_good() { return g_failed; }

cudaError_t check_launch(const void* kernel, const LaunchGrid& grid, dim3 block, size_t shared_bytes,
                         cudaStream_t stream, GridConfig& config) {
  const char* file = std::strrchr(grid.file, '/');
  config.name = std::string(file ? file + 1 : grid.file) + ":" + std::to_string(grid.line);
  config.grid = {grid.x, grid.y, grid.z};
  config.block = {block.x, block.y, block.z};
  config.dynamic_shared_bytes = shared_bytes;
  const auto limit = g_dynamic_shared_limit.find(kernel);
  const bool has_limit = limit != g_dynamic_shared_limit.end();
  config.max_shared_bytes = has_limit ? kSharedBytesOptin : kSharedBytes;
  const size_t dynamic_limit = has_limit ? size_t(limit->second) : kSharedBytes;
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  char text[160];
  if (threads == 0 || threads > 1024 || block.z > 64 || grid.x == 0 || grid.y == 0 || grid.z == 0 ||
      grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    std::snprintf(text, sizeof text, "%s: a grid of %u x %u x %u blocks of %u x %u x %u threads cannot be launched",
                  config.name.c_str(), grid.x, grid.y, grid.z, block.x, block.y, block.z);
    set_report(text);
    return remember(cudaErrorInvalidConfiguration);
  }
  if (device_of(stream) != current_device()) {
    std::snprintf(text, sizeof text, "%s: a stream of device %d in a thread that works with device %d",
                  config.name.c_str(), device_of(stream), current_device());
    set_report(text);
    return remember(cudaErrorInvalidResourceHandle);
  }
  if (shared_bytes > dynamic_limit) {
    std::snprintf(text, sizeof text, "%s: %zu bytes of dynamic shared memory, of which this kernel may have %zu",
                  config.name.c_str(), shared_bytes, dynamic_limit);
    set_report(text);
    return remember(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

}  // namespace rvllm::emu

using namespace rvllm::emu;

// RVLLM_EMU_DEVICE=none: a driver that finds no device; no_driver: what a machine without one says; old_driver.
cudaError_t cudaGetDeviceCount(int* count) {
  const char* device = std::getenv("RVLLM_EMU_DEVICE");
  *count = 0;
  if (device && std::strcmp(device, "none") == 0) return remember(cudaErrorNoDevice);
  if (device && std::strstr(device, "driver")) return remember(cudaErrorInsufficientDriver);
  *count = num_devices();
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  const char* device = std::getenv("RVLLM_EMU_DEVICE");
  *version = kCudaVersion;
  if (device && std::strcmp(device, "no_driver") == 0) *version = 0;
  if (device && std::strcmp(device, "old_driver") == 0) *version = 12040;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kCudaVersion;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = g_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (!exists(device)) return remember(cudaErrorInvalidDevice);
  g_device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (!exists(device)) return remember(cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "CPU emulator");
  size_t free = 0;
  cudaMemGetInfo(&free, &properties->totalGlobalMem);
  properties->sharedMemPerBlock = kSharedBytes;
  properties->sharedMemPerBlockOptin = kSharedBytesOptin;
  properties->sharedMemPerMultiprocessor = kSharedBytesOptin + 1024;
  properties->regsPerBlock = 65536;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->multiProcessorCount = kMultiprocessors;
  properties->major = kMajor;
  properties->minor = kMinor;
  properties->l2CacheSize = kL2Bytes;
  properties->memoryBusWidth = 256;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (!exists(device)) return remember(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = int(kSharedBytes); break;
    case cudaDevAttrMultiProcessorCount: *value = kMultiprocessors; break;
    case cudaDevAttrL2CacheSize: *value = kL2Bytes; break;
    case cudaDevAttrComputeCapabilityMajor: *value = kMajor; break;
    case cudaDevAttrComputeCapabilityMinor: *value = kMinor; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = int(kSharedBytesOptin) + 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(kSharedBytesOptin); break;
    default: return remember(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || size_t(value) > kSharedBytesOptin) return remember(cudaErrorInvalidValue);
  g_dynamic_shared_limit[function] = value;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = g_last;
  g_last = g_failed ? cudaErrorLaunchFailure : cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() { return g_last; }

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define RV_EMU_NAME(name) case name: return #name;
    RV_EMU_NAME(cudaSuccess)
    RV_EMU_NAME(cudaErrorInvalidValue)
    RV_EMU_NAME(cudaErrorMemoryAllocation)
    RV_EMU_NAME(cudaErrorInvalidConfiguration)
    RV_EMU_NAME(cudaErrorInvalidDevicePointer)
    RV_EMU_NAME(cudaErrorInsufficientDriver)
    RV_EMU_NAME(cudaErrorNoDevice)
    RV_EMU_NAME(cudaErrorInvalidDevice)
    RV_EMU_NAME(cudaErrorInvalidResourceHandle)
    RV_EMU_NAME(cudaErrorNotReady)
    RV_EMU_NAME(cudaErrorLaunchFailure)
    RV_EMU_NAME(cudaErrorStreamCaptureUnsupported)
    RV_EMU_NAME(cudaErrorStreamCaptureInvalidated)
#undef RV_EMU_NAME
  }
  return "unknown error";
}

// The emulator knows more than a number: what went wrong, where.
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess || last_report().empty() ? cudaGetErrorName(error) : last_report().c_str();
}

// Forgets all errors, which a real device keeps until its process ends: between the cases of a test.
extern "C" __attribute__((visibility("default"))) void rv_emu_reset() {
  g_last = cudaSuccess;
  g_failed = false;
  set_report("");
}
