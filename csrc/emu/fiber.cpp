#include "emu/fiber.h"

#include <cstring>
#include <vector>

#if defined(RV_EMU_TSAN)
extern "C" {
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void* __tsan_get_current_fiber();
void __tsan_acquire(void* object);
void __tsan_release(void* object);
}
#endif

#if !defined(RV_EMU_UCONTEXT)
// Saves the registers a call must keep on the stack, the stack pointer at *save, and continues at `load`.
extern "C" void rv_emu_switch(void** save, void* load);

#if defined(__x86_64__)
// An indirect jump at the end: a `ret` to another place than its call misses the return predictor, five times slower.
asm(R"(
.text
.globl rv_emu_switch
.hidden rv_emu_switch
.type rv_emu_switch,@function
rv_emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmp *%rcx
.size rv_emu_switch,.-rv_emu_switch
)");
constexpr int kEntryWord = 6, kFrameWords = 8;  // after six registers; then the null return address of the entry
#else
asm(R"(
.text
.globl rv_emu_switch
.hidden rv_emu_switch
.type rv_emu_switch,@function
rv_emu_switch:
  sub sp,sp,#160
  stp x19,x20,[sp,#0]
  stp x21,x22,[sp,#16]
  stp x23,x24,[sp,#32]
  stp x25,x26,[sp,#48]
  stp x27,x28,[sp,#64]
  stp x29,x30,[sp,#80]
  stp d8,d9,[sp,#96]
  stp d10,d11,[sp,#112]
  stp d12,d13,[sp,#128]
  stp d14,d15,[sp,#144]
  mov x9,sp
  str x9,[x0]
  mov sp,x1
  ldp x19,x20,[sp,#0]
  ldp x21,x22,[sp,#16]
  ldp x23,x24,[sp,#32]
  ldp x25,x26,[sp,#48]
  ldp x27,x28,[sp,#64]
  ldp x29,x30,[sp,#80]
  ldp d8,d9,[sp,#96]
  ldp d10,d11,[sp,#112]
  ldp d12,d13,[sp,#128]
  ldp d14,d15,[sp,#144]
  add sp,sp,#160
  ret
.size rv_emu_switch,.-rv_emu_switch
)");
constexpr int kEntryWord = 11, kFrameWords = 20;  // x30 is the twelfth saved register
#endif
#endif

namespace rvllm::emu {

#if defined(RV_EMU_TSAN)
namespace {

// Making one takes 50 us. Launches are ordered, so that a fiber may be used again in the next, but not in the same one.
constexpr size_t kMaxRetired = 3000;  // ThreadSanitizer has about 8,000 in all
std::vector<void*> g_free, g_retired;

void* take_tsan_fiber() {
  if (g_free.empty()) return __tsan_create_fiber(0);
  void* const fiber = g_free.back();
  g_free.pop_back();
  return fiber;
}

}  // namespace
#endif

void start_fiber(Fiber& fiber, char* stack, size_t bytes, void (*entry)()) {
#if defined(RV_EMU_UCONTEXT)
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack;
  fiber.context.uc_stack.ss_size = bytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
#else
  // 16-byte aligned at the entry, less the return address where a call would have pushed one.
  void** frame = reinterpret_cast<void**>(stack + bytes - 64) - kFrameWords;
  std::memset(frame, 0, kFrameWords * sizeof(void*));
  frame[kEntryWord] = reinterpret_cast<void*>(entry);
  fiber.stack_pointer = frame;
#endif
#if defined(RV_EMU_TSAN)
  fiber.tsan = take_tsan_fiber();
#endif
}

void switch_fiber(Fiber& from, Fiber& to) {
#if defined(RV_EMU_TSAN)
  __tsan_switch_to_fiber(to.tsan, 1);
#endif
#if defined(RV_EMU_UCONTEXT)
  swapcontext(&from.context, &to.context);
#else
  rv_emu_switch(&from.stack_pointer, to.stack_pointer);
#endif
}

#if defined(RV_EMU_TSAN)
void tsan_begin_launch(Fiber& fiber) {
  fiber.tsan = __tsan_get_current_fiber();
  g_free.insert(g_free.end(), g_retired.begin(), g_retired.end());
  g_retired.clear();
}
void tsan_retire(Fiber& fiber) {
  if (g_retired.size() + g_free.size() < kMaxRetired)
    g_retired.push_back(fiber.tsan);
  else
    __tsan_destroy_fiber(fiber.tsan);
}
void tsan_acquire(void* object) { __tsan_acquire(object); }
void tsan_release(void* object) { __tsan_release(object); }
#else
void tsan_begin_launch(Fiber&) {}
void tsan_retire(Fiber&) {}
void tsan_acquire(void*) {}
void tsan_release(void*) {}
#endif

}  // namespace rvllm::emu
