#include "emu/grid.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#include "emu/fiber.h"
#include "emu/shared_memory.h"

namespace rvllm::emu {

Thread* current_thread = nullptr;

namespace {

constexpr unsigned kMaxThreads = 1024;
#if defined(RV_EMU_TSAN)
// Every thread of a launch has a stack at an address of its own: reuse would look like a race between blocks.
constexpr size_t kStackBytes = size_t(64) << 10, kNumStacks = size_t(1) << 18;
#else
constexpr size_t kStackBytes = size_t(128) << 10, kNumStacks = kMaxThreads;
#endif
constexpr size_t kStackStagger = 128;  // spreads the tops of the stacks over the sets of the cache

enum class State { kReady, kAtBarrier, kAtWarpOperation, kDone };

struct GpuThread : Thread {
  Fiber fiber;
  State state;
  int site;  // where it waits
};

// The lanes of a warp that meet under one mask. Slots alternate, so that a fast lane does not overwrite what a slow one
// has yet to read.
struct WarpMeeting {
  unsigned mask, arrived, generation, index;
  int site;
  uint64_t slots[2][kWarpSize];
};
// Of fixed size: what one fiber allocates and another frees looks like a race.
struct Warp {
  unsigned count = 0;
  WarpMeeting meetings[kWarpSize];
};

struct Abort {};  // unwinds the threads of a launch that has failed

Statistics g_statistics;
std::string g_report;
std::mutex g_mutex;  // one grid at a time
char* g_stacks = nullptr;
size_t g_stacks_used = 0;
SharedMemory g_shared;
std::vector<GpuThread> g_threads(kMaxThreads);
Warp g_warps[kMaxThreads / kWarpSize];
Fiber g_scheduler;
GpuThread* g_running = nullptr;
const GridConfig* g_config = nullptr;
const std::function<void()>* g_body = nullptr;
unsigned g_count = 0, g_live = 0, g_at_barrier = 0;
uint64_t g_barrier_generation = 0;
bool g_aborted = false, g_is_lazy = false;
char g_launch_begin, g_launch_end;  // for ThreadSanitizer
size_t g_block_number = 0;          // in the launch

// What the threads of a block release and acquire, for ThreadSanitizer: at addresses of the block's own, since blocks
// are not ordered. `i`: 0 is the barrier, the rest are warps' meetings; they alternate like the slots.
void* order_object(unsigned i, uint64_t generation) {
#if defined(RV_EMU_TSAN)
  constexpr size_t kObjects = 2 * (1 + kMaxThreads), kBytes = size_t(1) << 36;  // addresses only: never touched
  static char* const base = map_memory(kBytes);
  return base + ((g_block_number * kObjects + 2 * i + (generation & 1)) * 8) % kBytes;
#else
  (void)i;
  (void)generation;
  return nullptr;
#endif
}

void abort_launch(const std::string& text) {
  if (!g_aborted) g_report = g_config->name + text;
  g_aborted = true;
}

std::string block_text(const Coord& block) {
  return " block(" + std::to_string(block.x) + "," + std::to_string(block.y) + "," + std::to_string(block.z) + ")";
}

void wait(State state, int site) {
  GpuThread* self = g_running;
  self->state = state;
  self->site = site;
  ++g_statistics.switches;
  switch_fiber(self->fiber, g_scheduler);
  if (g_aborted) throw Abort{};
}

void release_barrier() {
  g_at_barrier = 0;
  ++g_barrier_generation;
  for (unsigned i = 0; i < g_count; ++i)
    if (g_threads[i].state == State::kAtBarrier) g_threads[i].state = State::kReady;
}

void thread_entry() {
  tsan_acquire(&g_launch_begin);
  try {
    (*g_body)();
  } catch (Abort&) {
  }
  tsan_release(&g_launch_end);
  g_running->state = State::kDone;
  --g_live;
  if (g_live > 0 && g_at_barrier == g_live) {
    if (g_config->forbid_early_exit) abort_launch(": a thread returned while others wait at a barrier");
    release_barrier();
  }
  switch_fiber(g_running->fiber, g_scheduler);
  std::abort();  // a finished thread is never resumed
}

void resume(GpuThread& thread) {
  g_running = &thread;
  current_thread = &thread;
  ++g_statistics.switches;
  switch_fiber(g_scheduler, thread.fiber);
  g_running = nullptr;
}

// How the threads of a grid take turns.
class Schedule {
 public:
  Schedule() {
    const char* order = std::getenv("RVLLM_EMU_ORDER");
    order_ = order ? unsigned(std::atoi(order)) : 0;
    random_.seed(order_);
  }
  bool random() const { return order_ > 1; }
  void arrange(std::vector<unsigned>& items) {
    if (order_ == 1) std::reverse(items.begin(), items.end());
    if (random()) std::shuffle(items.begin(), items.end(), random_);
  }

 private:
  unsigned order_;
  std::mt19937 random_;
};

std::vector<unsigned> counted(size_t n) {
  std::vector<unsigned> items(n);
  std::iota(items.begin(), items.end(), 0u);
  return items;
}

void start_threads(const GridConfig& config, const Coord& block) {
  for (unsigned i = 0; i < g_count; ++i) {
    GpuThread& t = g_threads[i];
    t.thread_idx = {i % config.block.x, i / config.block.x % config.block.y, i / (config.block.x * config.block.y)};
    t.block_idx = block;
    t.block_dim = config.block;
    t.grid_dim = config.grid;
    t.lane = i % kWarpSize;
    t.warp = i / kWarpSize;
    t.linear = i;
    t.state = State::kReady;
    if (g_stacks_used == kNumStacks) throw std::bad_alloc();
    start_fiber(t.fiber, g_stacks + kStackBytes * g_stacks_used++, kStackBytes - kStackStagger * (i % 16),
                thread_entry);
  }
}

// Lets every thread of the warp that can run do so until it waits: once, or until all wait.
bool run_warp(unsigned warp, const std::vector<unsigned>& lanes, bool once) {
  bool any = false, again = true;
  while (again) {
    again = false;
    for (const unsigned lane : lanes) {
      const unsigned i = warp * kWarpSize + lane;
      if (i >= g_count) continue;
      const State state = g_threads[i].state;
      if (state == State::kReady || (g_aborted && state != State::kDone)) {
        resume(g_threads[i]);
        again = any = true;
      }
    }
    if (once) break;
  }
  return any;
}

void report_deadlock(const Coord& block) {
  unsigned at_barrier = 0, at_warp = 0, done = 0;
  for (unsigned i = 0; i < g_count; ++i) {
    at_barrier += g_threads[i].state == State::kAtBarrier;
    at_warp += g_threads[i].state == State::kAtWarpOperation;
    done += g_threads[i].state == State::kDone;
  }
  abort_launch(block_text(block) + ": deadlock: " + std::to_string(at_barrier) + " threads wait at a barrier, " +
               std::to_string(at_warp) + " at a warp operation, " + std::to_string(done) + " have returned");
}

void run_block(const GridConfig& config, const Coord& block, Schedule& schedule) {
#if !defined(RV_EMU_TSAN)
  g_stacks_used = 0;
#endif
  g_shared.begin_block(config.dynamic_shared_bytes);
  g_live = g_count;
  g_at_barrier = 0;
  ++g_statistics.blocks;
  g_statistics.threads += g_count;
  const unsigned num_warps = (g_count + kWarpSize - 1) / kWarpSize;
  for (unsigned w = 0; w < num_warps; ++w) g_warps[w].count = 0;
  start_threads(config, block);
  std::vector<unsigned> warps = counted(num_warps), lanes = counted(kWarpSize);
  schedule.arrange(warps);
  schedule.arrange(lanes);
  while (g_live > 0) {
    if (schedule.random()) {
      schedule.arrange(warps);
      schedule.arrange(lanes);
    }
    bool progress = false;
    for (const unsigned warp : warps) progress |= run_warp(warp, lanes, schedule.random());
    if (!progress) report_deadlock(block);
  }
  for (unsigned i = 0; i < g_count; ++i) tsan_retire(g_threads[i].fiber);
  g_statistics.max_shared_bytes = std::max(g_statistics.max_shared_bytes, g_shared.bytes());
  ++g_block_number;
}

WarpMeeting& meeting(unsigned mask, int site) {
  const Thread& self = *current_thread;
  if (!(mask >> self.lane & 1))
    kernel_error("lane %u calls a warp operation whose mask %08x leaves it out", self.lane, mask);
  Warp& warp = g_warps[self.warp];
  for (unsigned i = 0; i < warp.count; ++i) {
    WarpMeeting& m = warp.meetings[i];
    if (m.mask != mask) continue;
    if (m.arrived && m.site != site)
      kernel_error("lanes of one warp meet at different warp operations, of lines %d and %d", m.site, site);
    m.site = site;
    return m;
  }
  if (warp.count == kWarpSize) kernel_error("a warp uses more than %u masks", kWarpSize);
  WarpMeeting& m = warp.meetings[warp.count];
  m.mask = mask;
  m.arrived = m.generation = 0;
  m.index = 1 + self.warp * kWarpSize + warp.count++;
  m.site = site;
  return m;
}

}  // namespace

const std::string& last_report() { return g_report; }
void set_report(const std::string& text) { g_report = text; }
const Statistics& statistics() { return g_statistics; }
void* dynamic_shared() { return g_shared.dynamic(); }
bool is_lazy() { return g_is_lazy; }

void* shared_array(const void* key, size_t bytes, size_t align) {
  char* data = g_shared.array(key, bytes, align);
  if (g_shared.bytes() > g_config->max_shared_bytes)
    kernel_error("%zu bytes of shared memory, of which a block has %zu", g_shared.bytes(), g_config->max_shared_bytes);
  return data;
}

void kernel_error(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  const Coord& t = current_thread->thread_idx;
  abort_launch(block_text(current_thread->block_idx) + " thread(" + std::to_string(t.x) + "," + std::to_string(t.y) +
               "," + std::to_string(t.z) + "): " + text);
  throw Abort{};
}

void barrier(int site) {
  void* const order = order_object(0, g_barrier_generation);
  tsan_release(order);
  for (unsigned i = 0; g_at_barrier > 0 && i < g_count; ++i) {
    if (g_threads[i].state != State::kAtBarrier) continue;
    if (g_threads[i].site != site)
      kernel_error("divergent barrier: waits at line %d, and thread %u at line %d", site, i, g_threads[i].site);
    break;
  }
  if (g_config->forbid_early_exit && g_live != g_count) kernel_error("a barrier after a thread of the group returned");
  if (++g_at_barrier == g_live)
    release_barrier();
  else
    wait(State::kAtBarrier, site);
  tsan_acquire(order);
}

const uint64_t* warp_exchange(unsigned mask, uint64_t value, int site) {
  GpuThread& self = *g_running;
  WarpMeeting& m = meeting(mask, site);
  uint64_t* slots = m.slots[m.generation & 1];
  slots[self.lane] = value;
  m.arrived |= 1u << self.lane;
  if (m.arrived != mask) {
    wait(State::kAtWarpOperation, site);
    return slots;
  }
  m.arrived = 0;
  ++m.generation;
  const unsigned first = self.warp * kWarpSize;
  for (unsigned i = first; i < std::min(first + kWarpSize, g_count); ++i)
    if ((mask >> g_threads[i].lane & 1) && g_threads[i].state == State::kAtWarpOperation)
      g_threads[i].state = State::kReady;
  return slots;
}

void warp_sync(unsigned mask, int site) {
  const WarpMeeting& m = meeting(mask, site);
  void* const order = order_object(m.index, m.generation);
  tsan_release(order);
  warp_exchange(mask, 0, site);
  tsan_acquire(order);
}

bool run_grid(const GridConfig& config, const std::function<void()>& body) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  if (!g_stacks) g_stacks = map_memory(kStackBytes * kNumStacks);
#if defined(RV_EMU_TSAN)
  syscall(SYS_madvise, g_stacks, g_stacks_used * kStackBytes, MADV_DONTNEED);
#endif
  g_stacks_used = 0;
  g_config = &config;
  g_body = &body;
  g_aborted = false;
  const char* const lazy = std::getenv("RVLLM_EMU_LAZY");
  g_is_lazy = lazy && *lazy == '1';
  g_count = config.block.x * config.block.y * config.block.z;
  g_shared.begin_launch();
  g_block_number = 0;
  ++g_statistics.launches;
  tsan_begin_launch(g_scheduler);
  tsan_release(&g_launch_begin);

  Schedule schedule;
  std::vector<unsigned> blocks = counted(size_t(config.grid.x) * config.grid.y * config.grid.z);
  schedule.arrange(blocks);
  for (const unsigned b : blocks) {
    run_block(config, {b % config.grid.x, b / config.grid.x % config.grid.y, b / config.grid.x / config.grid.y},
              schedule);
    if (g_aborted) break;
  }
  tsan_acquire(&g_launch_end);
  current_thread = nullptr;
  return !g_aborted;
}

}  // namespace rvllm::emu
