#include "cpu/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace rvllm {
namespace {

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kMapping = size_t(64) << 20;

}  // namespace

Arena::~Arena() {
  for (const Mapping& m : mappings_) munmap(m.address, m.bytes);
}

uint8_t* Arena::take(size_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  if (bytes > left_) {
    const size_t size = std::max(kMapping, bytes) + kHugePage;  // room to begin at a huge page
    void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    mappings_.push_back({p, size});
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(p) + kHugePage - 1) / kHugePage * kHugePage;
    next_ = reinterpret_cast<uint8_t*>(begin);
    left_ = size - (begin - reinterpret_cast<uintptr_t>(p));
#ifdef MADV_HUGEPAGE
    madvise(next_, left_, MADV_HUGEPAGE);  // a wish: without it everything works, only slower
#endif
  }
  uint8_t* memory = next_;
  next_ += bytes;
  left_ -= bytes;
  return memory;
}

}  // namespace rvllm
