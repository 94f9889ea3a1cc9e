// Device and pinned memory. With RVLLM_EMU_GUARD=1 device memory cannot be touched while host code runs, and ends at an
// unreadable page (less its rounding to 256 bytes).
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include "emu/cuda/runtime_state.h"

namespace rvllm::emu {
namespace {

constexpr size_t kAlignment = 256, kPage = 4096;

struct Allocation {
  size_t bytes = 0;
  bool pinned = false;
  char* pages = nullptr;  // when guarded
  size_t page_bytes = 0;
};
std::map<uintptr_t, Allocation> g_allocations;
size_t g_device_bytes = 0;
int g_device_depth = 0;

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

size_t device_memory() { return size_t(setting("RVLLM_EMU_MEMORY", 8 << 10)) << 20; }  // MiB

const std::pair<const uintptr_t, Allocation>* find(const void* data) {
  const auto address = uintptr_t(data);
  auto it = g_allocations.upper_bound(address);
  if (it == g_allocations.begin()) return nullptr;
  --it;
  return address < it->first + it->second.bytes ? &*it : nullptr;
}

void protect(int protection) {
  for (const auto& [address, a] : g_allocations)
    if (a.pages) mprotect(a.pages, a.page_bytes, protection);
}

char* guarded_pages(size_t bytes, Allocation& a) {
  a.page_bytes = round_up(bytes, kPage);
  void* pages = mmap(nullptr, a.page_bytes + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) return nullptr;
  a.pages = static_cast<char*>(pages);
  mprotect(a.pages, a.page_bytes, PROT_READ | PROT_WRITE);
  return a.pages + a.page_bytes - bytes;
}

}  // namespace

DeviceAccess::DeviceAccess() {
  if (g_device_depth++ == 0) protect(PROT_READ | PROT_WRITE);
}

DeviceAccess::~DeviceAccess() {
  if (--g_device_depth == 0) protect(PROT_NONE);
}

bool on_device(const void* data, size_t bytes) {
  const auto* a = find(data);
  return a && !a->second.pinned && uintptr_t(data) + bytes <= a->first + a->second.bytes;
}

bool pinned(const void* data) {
  const auto* a = find(data);
  return a && a->second.pinned;
}

}  // namespace rvllm::emu

using namespace rvllm::emu;

cudaError_t cudaMalloc(void** data, size_t bytes) {
  if (const cudaError_t error = forbidden_in_capture("cudaMalloc")) return error;
  *data = nullptr;
  if (bytes == 0) return cudaSuccess;
  const size_t rounded = round_up(bytes, kAlignment);
  if (rounded < bytes || rounded > device_memory() - g_device_bytes) return remember(cudaErrorMemoryAllocation);
  Allocation a{bytes, false, nullptr, 0};
  // Without guards exactly so many bytes, so that AddressSanitizer sees the first one past the end.
  if (setting("RVLLM_EMU_GUARD", 0))
    *data = guarded_pages(rounded, a);
  else if (posix_memalign(data, kAlignment, bytes) != 0)
    *data = nullptr;
  if (!*data) return remember(cudaErrorMemoryAllocation);
  std::memset(*data, 0xFF, bytes);
  if (a.pages && g_device_depth == 0) mprotect(a.pages, a.page_bytes, PROT_NONE);
  g_allocations[uintptr_t(*data)] = a;
  g_device_bytes += rounded;
  return cudaSuccess;
}

cudaError_t cudaFree(void* data) {
  if (!data) return cudaSuccess;
  const auto it = g_allocations.find(uintptr_t(data));
  if (it == g_allocations.end() || it->second.pinned) return remember(cudaErrorInvalidValue);
  cudaDeviceSynchronize();
  const Allocation a = it->second;
  g_allocations.erase(it);
  g_device_bytes -= round_up(a.bytes, kAlignment);
  if (a.pages)
    munmap(a.pages, a.page_bytes + kPage);
  else
    std::free(data);
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void** data, size_t bytes) {
  if (const cudaError_t error = forbidden_in_capture("cudaMallocHost")) return error;
  *data = std::malloc(bytes ? bytes : 1);
  if (!*data) return remember(cudaErrorMemoryAllocation);
  std::memset(*data, 0xFF, bytes);
  g_allocations[uintptr_t(*data)] = {bytes, true, nullptr, 0};
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned) { return cudaMallocHost(data, bytes); }

cudaError_t cudaFreeHost(void* data) {
  if (!data) return cudaSuccess;
  const auto it = g_allocations.find(uintptr_t(data));
  if (it == g_allocations.end() || !it->second.pinned) return remember(cudaErrorInvalidValue);
  cudaDeviceSynchronize();
  g_allocations.erase(it);
  std::free(data);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = device_memory();
  *free = *total - g_device_bytes;
  return cudaSuccess;
}
