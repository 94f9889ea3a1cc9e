#include "emu/shared_memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <new>

extern "C" {
__attribute__((weak)) void __asan_poison_memory_region(const volatile void* data, size_t bytes);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void* data, size_t bytes);
}

namespace rvllm::emu {
namespace {

constexpr size_t kGap = 128;
#if defined(RV_EMU_TSAN)
// Every block has addresses of its own: at the same ones, blocks would seem to race for each other's shared memory.
constexpr bool kFreshAddresses = true;
constexpr size_t kArenaBytes = size_t(4) << 30;
#else
constexpr bool kFreshAddresses = false;
constexpr size_t kArenaBytes = size_t(1) << 20;
#endif

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

}  // namespace

char* map_memory(size_t bytes) {
  const long data = syscall(SYS_mmap, nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data < 0 && data > -4096) throw std::bad_alloc();
  return reinterpret_cast<char*>(data);
}

void fill_invalid(void* data, size_t bytes) {
  auto* p = static_cast<volatile unsigned char*>(data);
#if defined(__x86_64__)
  asm volatile("rep stosb" : "+D"(p), "+c"(bytes) : "a"(0xFF) : "memory");
#else
  for (size_t i = 0; i < bytes; ++i) p[i] = 0xFF;
#endif
}

char* SharedMemory::take(size_t bytes) {
  used_ = round_up(used_, kGap);
  char* data = arena_ + used_;
  used_ += round_up(bytes, 8) + kGap;
  if (used_ > kArenaBytes) throw std::bad_alloc();
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(data, bytes);
  fill_invalid(data, bytes);
  return data;
}

void SharedMemory::begin_launch() {
  if (!arena_) {
    arena_ = map_memory(kArenaBytes);
    used_ = kArenaBytes;
    arrays_.reserve(1 << 14);  // never to move: kernels add to it from their own stacks
  }
  if (__asan_poison_memory_region) __asan_poison_memory_region(arena_, used_);
  used_ = kGap;
}

void SharedMemory::begin_block(size_t dynamic_bytes) {
  if (!kFreshAddresses) begin_launch();
  ++block_;
  static_bytes_ = 0;
  dynamic_bytes_ = dynamic_bytes;
  dynamic_ = dynamic_bytes > 0 ? take(dynamic_bytes) : nullptr;
}

char* SharedMemory::array(const void* key, size_t bytes, size_t align) {
  Array& array = arrays_[key];
  if (array.block != block_) {
    array = {take(bytes), block_};
    static_bytes_ += round_up(bytes, align);
  }
  return array.data;
}

}  // namespace rvllm::emu
