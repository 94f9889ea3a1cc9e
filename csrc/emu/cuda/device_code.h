// What device code uses of CUDA: qualifiers, built-in variables, vector types, warp operations, atomics, intrinsics.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "emu/grid.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static_assert(false, "shared memory is declared with RV_SHARED or RV_DYN_SHARED");
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))

#define threadIdx (::rvllm::emu::current_thread->thread_idx)
#define blockIdx (::rvllm::emu::current_thread->block_idx)
#define blockDim (::rvllm::emu::current_thread->block_dim)
#define gridDim (::rvllm::emu::current_thread->grid_dim)
constexpr int warpSize = 32;

// An array of the running block; each place in the source that names one has its own key.
#define RV_EMU_SHARED(T, N)                                        \
  *reinterpret_cast<T(*)[N]>(::rvllm::emu::shared_array(           \
      []() -> const void* {                                        \
        static char key;                                           \
        return &key;                                               \
      }(),                                                         \
      sizeof(T) * (N), alignof(T)))

#if defined(__SANITIZE_THREAD__)
#define RV_EMU_NO_TSAN __attribute__((no_sanitize_thread))
#else
#define RV_EMU_NO_TSAN
#endif
#define RV_EMU_SITE int site = __builtin_LINE()

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#define RV_EMU_VECTORS(T, name, align2, align4)                                                          \
  struct __align__(align2) name##2 { T x, y; };                                                          \
  struct name##3 { T x, y, z; };                                                                         \
  struct __align__(align4) name##4 { T x, y, z, w; };                                                    \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                             \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                                     \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
RV_EMU_VECTORS(signed char, char, 2, 4)
RV_EMU_VECTORS(unsigned char, uchar, 2, 4)
RV_EMU_VECTORS(short, short, 4, 8)
RV_EMU_VECTORS(unsigned short, ushort, 4, 8)
RV_EMU_VECTORS(int, int, 8, 16)
RV_EMU_VECTORS(unsigned, uint, 8, 16)
RV_EMU_VECTORS(float, float, 8, 16)
RV_EMU_VECTORS(long long, longlong, 16, 16)
RV_EMU_VECTORS(double, double, 16, 16)
#undef RV_EMU_VECTORS

// ---- barriers and warp operations
inline void __syncthreads(RV_EMU_SITE) { rvllm::emu::barrier(site); }
inline void __syncwarp(unsigned mask = 0xffffffffu, RV_EMU_SITE) { rvllm::emu::warp_sync(mask, site); }
inline void __threadfence() {}
inline void __threadfence_block() {}

namespace rvllm::emu {

// The value of lane `source`, or the own one where there is no such lane in the segment (source < 0).
template <class T>
RV_EMU_NO_TSAN inline T shuffle(unsigned mask, T value, int source, int site) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "a type that cannot be shuffled");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  const uint64_t* lanes = warp_exchange(mask, bits, site);
  if (source < 0) return value;
  if (!(mask >> source & 1)) kernel_error("a shuffle reads lane %d, which its mask %08x leaves out", source, mask);
  T result;
  std::memcpy(&result, &lanes[source], sizeof result);
  return result;
}

inline int lane() { return int(current_thread->lane); }
inline int segment(int width) { return lane() & ~(width - 1); }
inline int inside(int source, int width) {
  return source >= segment(width) && source < segment(width) + width ? source : -1;
}

}  // namespace rvllm::emu

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, RV_EMU_SITE) {
  return rvllm::emu::shuffle(mask, value, rvllm::emu::segment(width) + (source & (width - 1)), site);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, RV_EMU_SITE) {
  using namespace rvllm::emu;
  const int source = lane() ^ lane_mask;
  return shuffle(mask, value, source < segment(width) + width ? source : -1, site);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, RV_EMU_SITE) {
  using namespace rvllm::emu;
  return shuffle(mask, value, inside(lane() + int(delta), width), site);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, RV_EMU_SITE) {
  using namespace rvllm::emu;
  return shuffle(mask, value, inside(lane() - int(delta), width), site);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, RV_EMU_SITE) {
  const uint64_t* lanes = rvllm::emu::warp_exchange(mask, predicate != 0, site);
  unsigned result = 0;
  for (unsigned i = 0; i < 32; ++i)
    if (mask >> i & 1) result |= unsigned(lanes[i] & 1) << i;
  return result;
}
inline int __any_sync(unsigned mask, int predicate, RV_EMU_SITE) { return __ballot_sync(mask, predicate, site) != 0; }
inline int __all_sync(unsigned mask, int predicate, RV_EMU_SITE) {
  return __ballot_sync(mask, predicate, site) == mask;
}
inline unsigned __activemask() {
  rvllm::emu::kernel_error("__activemask() depends on how a GPU happens to schedule a warp");
}
template <class T>
inline T rv_emu_reduce(unsigned mask, T value, int site, T (*combine)(T, T)) {
  const uint64_t* lanes = rvllm::emu::warp_exchange(mask, uint64_t(uint32_t(value)), site);
  const uint64_t* lane = lanes;
  T result = value;
  for (unsigned i = 0; i < 32; ++i, ++lane)
    if ((mask >> i & 1) && i != rvllm::emu::current_thread->lane) result = combine(result, T(uint32_t(*lane)));
  return result;
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value, RV_EMU_SITE) {
  return rv_emu_reduce<unsigned>(mask, value, site, [](unsigned a, unsigned b) { return a + b; });
}
inline int __reduce_add_sync(unsigned mask, int value, RV_EMU_SITE) {
  return int(__reduce_add_sync(mask, unsigned(value), site));
}
inline int __reduce_max_sync(unsigned mask, int value, RV_EMU_SITE) {
  return rv_emu_reduce<int>(mask, value, site, [](int a, int b) { return std::max(a, b); });
}

// ---- atomics: the compiler's own, so that ThreadSanitizer knows them for what they are
template <class T, class Combine>
inline T rv_emu_atomic(T* address, T value, Combine combine) {
  T old;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  for (;;) {
    T next = combine(old, value);
    if (__atomic_compare_exchange(address, &old, &next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return old;
  }
}
template <class T>
using rv_emu_same = typename std::common_type<T>::type;  // not deduced: atomicAdd(float*, 1) converts, as in CUDA
template <class T>
inline T atomicAdd(T* address, rv_emu_same<T> value) {
  return rv_emu_atomic(address, value, [](T a, T b) { return T(a + b); });
}
template <class T>
inline T atomicMax(T* address, rv_emu_same<T> value) {
  return rv_emu_atomic(address, value, [](T a, T b) { return std::max(a, b); });
}
template <class T>
inline T atomicMin(T* address, rv_emu_same<T> value) {
  return rv_emu_atomic(address, value, [](T a, T b) { return std::min(a, b); });
}
template <class T>
inline T atomicOr(T* address, rv_emu_same<T> value) {
  return rv_emu_atomic(address, value, [](T a, T b) { return T(a | b); });
}
template <class T>
inline T atomicExch(T* address, rv_emu_same<T> value) {
  return rv_emu_atomic(address, value, [](T, T b) { return b; });
}
template <class T>
inline T atomicCAS(T* address, rv_emu_same<T> expected, rv_emu_same<T> value) {
  T old = expected, next = value;
  __atomic_compare_exchange(address, &old, &next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return old;
}

// ---- arithmetic. The fast ones are exact here: how much a GPU's differ, only a GPU can tell.
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __saturatef(float x) { return std::min(1.0f, std::max(0.0f, x)); }
inline int __float2int_rn(float x) { return int(std::nearbyint(x)); }
inline int __float2int_rz(float x) { return int(x); }
inline float __int2float_rn(int x) { return float(x); }

template <class To, class From>
inline To rv_emu_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits of another size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline int __float_as_int(float x) { return rv_emu_bits<int>(x); }
inline float __int_as_float(int x) { return rv_emu_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return rv_emu_bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return rv_emu_bits<float>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = uint64_t(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = selector >> (4 * i) & 15;
    unsigned byte = unsigned(bytes >> (8 * (pick & 7)) & 0xff);
    if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
}
inline int __dp4a(int a, int b, int c) {
  unsigned sum = unsigned(c);
  for (int i = 0; i < 4; ++i) sum += unsigned(int(int8_t(a >> (8 * i))) * int(int8_t(b >> (8 * i))));
  return int(sum);
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 4; ++i) c += (a >> (8 * i) & 255) * (b >> (8 * i) & 255);
  return c;
}
// Four signed bytes at a time.
template <class Combine>
inline unsigned rv_emu_bytes(unsigned a, unsigned b, Combine combine) {
  unsigned result = 0;
  for (int i = 0; i < 32; i += 8) result |= unsigned(uint8_t(combine(int8_t(a >> i), int8_t(b >> i)))) << i;
  return result;
}
inline unsigned __vsub4(unsigned a, unsigned b) {
  return rv_emu_bytes(a, b, [](int x, int y) { return x - y; });
}
inline unsigned __vadd4(unsigned a, unsigned b) {
  return rv_emu_bytes(a, b, [](int x, int y) { return x + y; });
}
inline unsigned __vsubss4(unsigned a, unsigned b) {
  return rv_emu_bytes(a, b, [](int x, int y) { return std::min(127, std::max(-128, x - y)); });
}
inline unsigned __vcmpeq4(unsigned a, unsigned b) {
  return rv_emu_bytes(a, b, [](int x, int y) { return x == y ? 0xff : 0; });
}
inline unsigned __vcmpne4(unsigned a, unsigned b) {
  return rv_emu_bytes(a, b, [](int x, int y) { return x != y ? 0xff : 0; });
}

template <class T>
inline T __ldg(const T* p) {
  return *p;
}
template <class T>
inline T __ldcs(const T* p) {
  return *p;
}
template <class A, class B>
inline typename std::common_type<A, B>::type min(A a, B b) {
  using C = typename std::common_type<A, B>::type;
  return C(a) < C(b) ? C(a) : C(b);
}
template <class A, class B>
inline typename std::common_type<A, B>::type max(A a, B b) {
  using C = typename std::common_type<A, B>::type;
  return C(a) > C(b) ? C(a) : C(b);
}
