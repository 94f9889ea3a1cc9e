// 16 lanes as two 256-bit registers, byte dot products by maddubs, or by AVX-VNNI where the file is compiled for it.
// Included inside an anonymous namespace; contracts are in vec_scalar.h.

struct Vec { __m256 lo, hi; };
struct IVec { __m256i lo, hi; };
struct Bytes { __m256i lo, hi; };

constexpr int kRows = 4;
constexpr int kDirectRows = 8;
constexpr int kColumnVecs = 2;
constexpr int kScoreVecs = 2;
#ifdef __AVXVNNI__
constexpr int kByteOffset = 128;  // vpdpbusd takes unsigned codes
#else
constexpr int kByteOffset = 0;
#endif

inline Vec set1(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }

inline Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}

inline Vec abs(Vec a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}

inline Vec round(Vec a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, kNearest), _mm256_round_ps(a.hi, kNearest)};
}

inline Vec select_ge(Vec a, Vec b, Vec yes, Vec no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ)),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ))};
}

inline __m256 pow2(__m256 n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}

inline Vec pow2(Vec n) { return {pow2(n.lo), pow2(n.hi)}; }

inline Vec load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}

inline __m256 load_bf16_8(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}

inline Vec load_bf16(const uint16_t* p) { return {load_bf16_8(p), load_bf16_8(p + 8)}; }

inline void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}

inline void store_f16(uint16_t* p, Vec a) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}

inline void store_i8(int8_t* p, Vec a) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  _mm_storeu_si128((__m128i*)p, bytes);
}

inline float reduce_add(Vec a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline float reduce_max(Vec a) {
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline float reduce_max_abs(Vec a, Vec b) {
  const Vec x = abs(a), y = abs(b);
  const __m256i eight =
      _mm256_max_epi32(_mm256_max_epi32(_mm256_castps_si256(x.lo), _mm256_castps_si256(x.hi)),
                       _mm256_max_epi32(_mm256_castps_si256(y.lo), _mm256_castps_si256(y.hi)));
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1))));
}

inline IVec iset1(int32_t a) { return {_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }
inline IVec iload(const int32_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
inline IVec iload_i8(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}

inline void istore(int32_t* p, IVec a) {
  _mm256_storeu_si256((__m256i*)p, a.lo);
  _mm256_storeu_si256((__m256i*)(p + 8), a.hi);
}

inline IVec iand(IVec a, IVec b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
inline IVec ishift_right(IVec a, int bits) { return {_mm256_srai_epi32(a.lo, bits), _mm256_srai_epi32(a.hi, bits)}; }
inline IVec ishift_left(IVec a, int bits) { return {_mm256_slli_epi32(a.lo, bits), _mm256_slli_epi32(a.hi, bits)}; }
inline IVec iadd(IVec a, IVec b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline IVec isub(IVec a, IVec b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
inline IVec imul(IVec a, IVec b) { return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)}; }
inline Vec to_float(IVec a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }

inline __m256i broadcast4(const int8_t* a) {
  int32_t four;
  __builtin_memcpy(&four, a, 4);
  return _mm256_set1_epi32(four);
}

inline Bytes bload(const uint8_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}

inline void bstore(uint8_t* p, Bytes a) {
  _mm256_storeu_si256((__m256i*)p, a.lo);
  _mm256_storeu_si256((__m256i*)(p + 32), a.hi);
}

inline Bytes bor(Bytes a, Bytes b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
inline Bytes offset(Bytes a) {
  if (!kByteOffset) return a;
  const __m256i bits = _mm256_set1_epi8(char(kByteOffset));
  return {_mm256_xor_si256(a.lo, bits), _mm256_xor_si256(a.hi, bits)};
}

inline __m256i field(__m256i a, int from, int width, int to) {
  const __m256i moved = from > to ? _mm256_srli_epi16(a, from - to) : _mm256_slli_epi16(a, to - from);
  return _mm256_and_si256(moved, _mm256_set1_epi8(char(((1 << width) - 1) << to)));
}

inline Bytes field(Bytes a, int from, int width, int to) {
  return {field(a.lo, from, width, to), field(a.hi, from, width, to)};
}

inline Bytes load_table(const uint8_t* p) {
  const __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
  return {values, values};
}

inline Bytes look_up(Bytes table, Bytes codes) {
  return {_mm256_shuffle_epi8(table.lo, codes.lo), _mm256_shuffle_epi8(table.hi, codes.hi)};
}

#ifdef __AVXVNNI__

// sum + the dot products of 4 unsigned codes and 4 signed activations. RVLLM_EMULATED_ISAS does it without the
// instruction, for tests on other processors.
inline __m256i add_dot(__m256i sum, __m256i codes, __m256i x) {
#ifdef RVLLM_EMULATED_ISAS
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(codes, 8), _mm256_srai_epi16(x, 8));
  return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
#else
  return _mm256_dpbusd_avx_epi32(sum, codes, x);
#endif
}

inline IVec add_dot(IVec sum, Bytes codes, const int8_t* a) {
  const __m256i x = broadcast4(a);
  return {add_dot(sum.lo, codes.lo, x), add_dot(sum.hi, codes.hi, x)};
}

#include "cpu/isa/vnni_dot_rows.h"

#else

// Has sums made one after the other: gcc would make a tree of them, whose terms do not fit the registers.
inline __m256i in_order(__m256i a) {
  asm("" : "+x"(a));
  return a;
}

// Unsigned codes times signed activations: maddubs adds pairs in 16 bits, which hold the sums of `kWiden` groups
// (2 x 127 x largest code each) before they must be widened to 32.
template <int Bits, int Groups, int R, class Group>
inline void dot_rows(const Group& group, const int8_t* a, IVec* out) {
  constexpr int kWiden = Bits <= 4 ? 8 : Bits == 5 ? 4 : Bits == 6 ? 2 : 1;
  constexpr int kSpan = kWiden < Groups ? kWiden : Groups;
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) out[r] = iset1(0);
#pragma GCC unroll 8
  for (int g0 = 0; g0 < Groups; g0 += kSpan) {
    __m256i lo[R], hi[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) lo[r] = hi[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int g = g0; g < g0 + kSpan; ++g) {
      const Bytes w = group(g);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m256i x = broadcast4(a + 32 * r + 4 * g);
        if (Bits == 8) {  // signed: |w| times x with w's sign; 2 x 128 x 127 still fits 16 bits
          lo[r] = _mm256_maddubs_epi16(_mm256_abs_epi8(w.lo), _mm256_sign_epi8(x, w.lo));
          hi[r] = _mm256_maddubs_epi16(_mm256_abs_epi8(w.hi), _mm256_sign_epi8(x, w.hi));
        } else {
          lo[r] = in_order(_mm256_add_epi16(lo[r], _mm256_maddubs_epi16(w.lo, x)));
          hi[r] = in_order(_mm256_add_epi16(hi[r], _mm256_maddubs_epi16(w.hi, x)));
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      out[r].lo = in_order(_mm256_add_epi32(out[r].lo, _mm256_madd_epi16(lo[r], ones)));
      out[r].hi = in_order(_mm256_add_epi32(out[r].hi, _mm256_madd_epi16(hi[r], ones)));
    }
  }
}

#endif
