#include "cpu/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace rvllm {
namespace {

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kPiece = size_t(64) << 20;

}  // namespace

HugePages::HugePages(size_t bytes) : mapping_bytes_(bytes + kHugePage) {  // room to begin at a huge page
  mapping_ = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::bad_alloc();
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(mapping_) + kHugePage - 1) / kHugePage * kHugePage;
  data_ = reinterpret_cast<uint8_t*>(begin);
#ifdef MADV_HUGEPAGE
  madvise(data_, bytes, MADV_HUGEPAGE);  // a wish: without it everything works, only slower
#endif
}

HugePages::~HugePages() {
  if (mapping_) munmap(mapping_, mapping_bytes_);
}

uint8_t* Arena::take(size_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  if (bytes > left_) {
    left_ = std::max(kPiece, bytes);
    next_ = pages_.emplace_back(left_).data();
  }
  uint8_t* memory = next_;
  next_ += bytes;
  left_ -= bytes;
  return memory;
}

}  // namespace rvllm
