#include "cpu/cpu_features.h"

#include <cstdlib>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "check.h"

namespace rvllm {
namespace {

constexpr const char* kKnownIsas[] = {"scalar", "avx2", "avx_vnni", "avx512_vnni", "amx", "neon", "neon_i8mm"};

#if defined(__x86_64__)
// clang's builtin knows it from 18 on.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

#if defined(RVLLM_EMULATED_ISAS)
bool has_avx_vnni() { return true; }
bool has_tiles() { return true; }
#else
bool has_avx_vnni() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kVnni = 1u << 4;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & kVnni);
}

#if defined(__linux__)
// CPUID may say AMX while its first instruction still faults: the system has to be asked for the tiles, once a process.
bool has_tiles() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;
  if ((edx & kTile) == 0 || (edx & kInt8) == 0) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool is_permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return is_permitted;
}
#else
bool has_tiles() { return false; }
#endif
#endif
#endif

#if defined(__aarch64__)
#if defined(__linux__)
bool has_dot_product() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }
bool has_int8_matmul() { return getauxval(AT_HWCAP2) & HWCAP2_I8MM; }
#elif defined(__APPLE__)
bool has_feature(const char* name) {
  int has = 0;
  size_t size = sizeof(has);
  return sysctlbyname(name, &has, &size, nullptr, 0) == 0 && has;
}

bool has_dot_product() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
bool has_int8_matmul() { return has_feature("hw.optional.arm.FEAT_I8MM"); }
#else
bool has_dot_product() { return false; }
bool has_int8_matmul() { return false; }
#endif
#endif

}  // namespace

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> tables{&kernels_scalar()};
#if defined(__x86_64__)
  // The builtin asks the operating system's saved state (XCR0) as well as CPUID.
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512vnni");
  if (has_avx2) tables.push_back(&kernels_avx2());
  if (has_avx2 && has_avx_vnni()) tables.push_back(&kernels_avx_vnni());
  if (has_avx512) tables.push_back(&kernels_avx512_vnni());
  if (has_avx512 && has_tiles()) tables.push_back(&kernels_amx());
#elif defined(__aarch64__)
  if (has_dot_product()) tables.push_back(&kernels_neon());
  if (has_dot_product() && has_int8_matmul()) tables.push_back(&kernels_neon_i8mm());
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
  for (const char* known : kKnownIsas)
    check(name != known, "isa '", name, "' is not available here; available: ", names);
  fail("isa '", name, "' is unknown; available here: ", names);
}

}  // namespace rvllm
