// Runs a grid of a GPU kernel on one thread of the CPU: blocks one after another, the threads of a block as fibers that
// switch at barriers and warp operations. CUDA and Metal stand-ins share it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace rvllm::emu {

constexpr unsigned kWarpSize = 32;

struct Coord {
  unsigned x, y, z;
};

// What the running thread of a kernel knows about itself.
struct Thread {
  Coord thread_idx, block_idx, block_dim, grid_dim;
  unsigned lane, warp, linear;
};
extern Thread* current_thread;

struct GridConfig {
  Coord grid, block;
  size_t dynamic_shared_bytes = 0;
  size_t max_shared_bytes = 0;
  bool forbid_early_exit = false;  // Metal: a thread that returned may not be missing at a barrier
  std::string name;                // for reports
};

// Runs body() once a thread. Returns false when a thread broke a rule of the machine; last_report() then says which.
// RVLLM_EMU_ORDER is the order of blocks, warps and lanes: 0 forward, 1 backward, else the seed of a random one.
bool run_grid(const GridConfig& config, const std::function<void()>& body);
const std::string& last_report();
void set_report(const std::string& text);

struct Statistics {
  uint64_t launches = 0, blocks = 0, threads = 0, switches = 0;
  size_t max_shared_bytes = 0;
};
const Statistics& statistics();

// The rest is called by running threads. A site is the line of the call: threads meet only at one and the same.
void barrier(int site);
void warp_sync(unsigned mask, int site);
// Deposits `value`, waits until every lane of the mask has, and returns what each lane deposited.
const uint64_t* warp_exchange(unsigned mask, uint64_t value, int site);
void* dynamic_shared();
void* shared_array(const void* key, size_t bytes, size_t align);
bool is_lazy();  // RVLLM_EMU_LAZY=1, as of the launch: copies are made as late as they may be
[[noreturn]] void kernel_error(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace rvllm::emu
