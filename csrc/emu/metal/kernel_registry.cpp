#include "emu/metal/kernel_registry.h"

#include <cstdlib>
#include <map>
#include <set>

namespace rvllm::emu {
namespace {

struct Kernel {
  KernelFunction function;
  unsigned most_threads;
};

std::map<std::string, Kernel>& registry() {
  static std::map<std::string, Kernel> kernels;
  return kernels;
}

std::set<std::string>& constant_users() {
  static std::set<std::string> names;
  return names;
}

const Bindings* g_bindings = nullptr;  // of the kernel that runs
unsigned g_schedule = 0;

// With RVLLM_EMU_FLUSH=1 kernels take numbers below float's smallest normal one for zero, as a GPU may.
class Flushing {
#if defined(__x86_64__)
 public:
  Flushing() : before_(__builtin_ia32_stmxcsr()) {
    const char* const value = std::getenv("RVLLM_EMU_FLUSH");
    if (value && std::atoi(value) != 0) __builtin_ia32_ldmxcsr(before_ | 0x8040);
  }
  ~Flushing() { __builtin_ia32_ldmxcsr(before_); }

 private:
  unsigned before_;
#endif
};

// Faults of a machine, for tests: RVLLM_EMU_MISSING_KERNEL and RVLLM_EMU_FAILING_KERNEL name one.
bool is_named(const char* setting, const std::string& kernel) {
  const char* const value = std::getenv(setting);
  return value && kernel == value;
}

}  // namespace

KernelRegistration::KernelRegistration(const char* name, unsigned most_threads, KernelFunction function) {
  registry()[name] = {std::move(function), most_threads};
}
unsigned most_threads(const std::string& name) { return registry().at(name).most_threads; }
ConstantUser::ConstantUser(const char* kernel) { constant_users().insert(kernel); }
bool has_kernel(const std::string& name) {
  return registry().count(name) > 0 && !is_named("RVLLM_EMU_MISSING_KERNEL", name);
}
bool uses_constants(const std::string& name) { return constant_users().count(name) > 0; }

std::string dispatch_kernel(const std::string& name, const Bindings& bindings, Coord groups, Coord threads) {
  if (is_named("RVLLM_EMU_FAILING_KERNEL", name)) return name + ": the device has failed";
  GridConfig config;
  config.grid = groups;
  config.block = threads;
  config.dynamic_shared_bytes = bindings.threadgroup_bytes;
  config.max_shared_bytes = kMaxThreadgroupBytes;
  config.forbid_early_exit = true;
  config.name = name;
  const KernelFunction& kernel = registry().at(name).function;
  const char* const order = std::getenv("RVLLM_EMU_ORDER");
  g_bindings = &bindings;
  g_schedule = order ? unsigned(std::atoi(order)) : 0;
  [[maybe_unused]] const Flushing flushing;
  return run_grid(config, [&] { kernel(bindings); }) ? std::string() : last_report();
}

unsigned schedule() { return g_schedule; }

FunctionConstant::operator bool() const {
  const int value = g_bindings->constants[index];
  if (value < 0) kernel_error("function constant %d has no value", index);
  return value != 0;
}

}  // namespace rvllm::emu
