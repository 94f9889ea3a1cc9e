#include "cpu/cpu_features.h"

#include <cstdlib>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "check.h"

namespace rvllm {
namespace {

constexpr const char* kKnownIsas[] = {"scalar", "avx2", "avx512_vnni", "amx", "neon"};

#if defined(__aarch64__)
bool has_dot_product() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#elif defined(__APPLE__)
  int has = 0;
  size_t size = sizeof(has);
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) == 0 && has;
#else
  return false;
#endif
}
#endif

}  // namespace

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> tables{&kernels_scalar()};
#if defined(__x86_64__)
  // The builtin asks the operating system's saved state (XCR0) as well as CPUID.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    tables.push_back(&kernels_avx2());
  if (tables.size() == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vnni"))
    tables.push_back(&kernels_avx512_vnni());
#elif defined(__aarch64__)
  if (has_dot_product()) tables.push_back(&kernels_neon());
#endif
  return tables;
}

const Kernels& select_kernels(const std::string& isa) {
  const auto tables = available_kernels();
  std::string name = isa;
  if (name.empty())
    if (const char* forced = std::getenv("RVLLM_ISA")) name = forced;
  if (name.empty()) return *tables.back();
  std::string names;
  for (const Kernels* table : tables) {
    if (name == table->name) return *table;
    names += (names.empty() ? "" : ", ") + std::string(table->name);
  }
  for (const char* known : kKnownIsas) check(name != known, "isa '", name, "' is not available here; available: ", names);
  fail("isa '", name, "' is unknown; available here: ", names);
}

}  // namespace rvllm
