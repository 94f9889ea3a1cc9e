// What the files of the emulated runtime share.
#pragma once

#include <cstddef>

#include "cuda_runtime.h"

namespace rvllm::emu {

// The number an environment variable holds, read at each call so that tests can change it.
int setting(const char* name, int otherwise);

// Of the calling thread.
int current_device();
int device_of(Stream* stream);

// Remembers an error for cudaGetLastError; a failed launch stays.
cudaError_t remember(cudaError_t error);
bool failed_for_good();

// Whether [data, data + bytes) lies inside one allocation of device memory, or begins inside one of pinned host memory.
bool on_device(const void* data, size_t bytes);
bool pinned(const void* data);

// While device code runs its memory can be touched, also with RVLLM_EMU_GUARD=1.
class DeviceAccess {
 public:
  DeviceAccess();
  ~DeviceAccess();
};

// cudaErrorStreamCaptureUnsupported while a stream is captured, with what was done as the report.
cudaError_t forbidden_in_capture(const char* what);

}  // namespace rvllm::emu
