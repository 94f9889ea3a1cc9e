// What every .cu file shares. The same source is compiled by nvcc for a GPU and, over csrc/emu/cuda/include, by any C++
// compiler for the emulator; the few things that only one of them can spell are here: launches and shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

// RV_EMU is defined in the emulator: code for a GPU alone (inline PTX) stands in #if !defined(RV_EMU).

// RV_SHARED(float, part, 32) declares float part[32] in shared memory; RV_DYN_SHARED(float, buf) declares float* buf,
// the launch's dynamic shared memory, aligned to 16 bytes.
#if defined(RV_EMU)
#define RV_SHARED(T, name, N) T(&name)[N] = RV_EMU_SHARED(T, N)
#define RV_DYN_SHARED(T, name) T* name = static_cast<T*>(rvllm::emu::dynamic_shared())
#else
#define RV_SHARED(T, name, N) __shared__ T name[N]
#define RV_DYN_SHARED(T, name)                                    \
  extern __shared__ __align__(16) unsigned char rv_dyn_shared_[]; \
  T* name = reinterpret_cast<T*>(rv_dyn_shared_)
#endif

namespace rvllm {

constexpr unsigned kFullWarp = 0xffffffffu;

// Throws runtime_error saying in words why `what` failed: no driver, an old one, no device, too little memory, or else
// the error's name and text.
void check_cuda(cudaError_t error, const char* what);
// Throws as check_cuda does unless CUDA can use this device of the machine.
void require_device(int device);
// Device memory, at least 256-byte aligned; throws runtime_error with the bytes asked for and the bytes free.
void* device_malloc(size_t bytes, const char* what);
// "1.5 GiB", "12.0 MiB"
std::string format_bytes(size_t bytes);

}  // namespace rvllm

#if defined(RV_EMU) || defined(__CUDACC__)
namespace rv {

// kernel<<<grid, block, shared_bytes, stream>>>(args...): converts the arguments as a call would, and throws on a bad
// launch.
#if defined(RV_EMU)
template <class... P, class... A>
void launch(void (*kernel)(P...), rvllm::emu::LaunchGrid grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
            A&&... args) {
  rvllm::check_cuda(rvllm::emu::launch_kernel(kernel, grid, block, shared_bytes, stream, std::forward<A>(args)...),
                    "launching a kernel");
}
#else
template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, A&&... args) {
  kernel<<<grid, block, shared_bytes, stream>>>(std::forward<A>(args)...);
  rvllm::check_cuda(cudaGetLastError(), "launching a kernel");
}
#endif

}  // namespace rv
#endif
