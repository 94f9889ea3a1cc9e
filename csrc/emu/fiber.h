// Switching between the threads of an emulated block: each has a stack of its own, all run on one thread of the system.
#pragma once

#if !defined(RV_EMU_UCONTEXT) && !defined(__x86_64__) && !defined(__aarch64__)
#define RV_EMU_UCONTEXT 1  // slower by ten times: a system call a switch
#endif
#if defined(RV_EMU_UCONTEXT)
#include <ucontext.h>
#endif

#include <cstddef>

namespace rvllm::emu {

struct Fiber {
  void* stack_pointer = nullptr;  // where its registers are saved, while it does not run
  void* tsan = nullptr;           // ThreadSanitizer's idea of it
#if defined(RV_EMU_UCONTEXT)
  ucontext_t context;
#endif
};

// Makes `fiber` begin with entry(), which must never return, on [stack, stack + bytes).
void start_fiber(Fiber& fiber, char* stack, size_t bytes, void (*entry)());
void switch_fiber(Fiber& from, Fiber& to);

// The rest tells ThreadSanitizer what orders the fibers; without it these do nothing.
void tsan_begin_launch(Fiber& fiber);  // the fiber that runs now, the system's own thread, is the scheduler
void tsan_retire(Fiber& fiber);        // it has ended; threads of a later launch may take its place
void tsan_acquire(void* object);
void tsan_release(void* object);

}  // namespace rvllm::emu
