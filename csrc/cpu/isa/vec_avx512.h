// 16 lanes as one 512-bit register, byte dot products by VNNI. Included inside an anonymous namespace; contracts are in
// vec_scalar.h.

using Vec = __m512;
using IVec = __m512i;
using Bytes = __m512i;

constexpr int kRows = 8;
constexpr int kDirectRows = kRowBlock;
constexpr int kColumnVecs = 4;
constexpr int kScoreVecs = 4;
constexpr int kByteOffset = 128;  // vpdpbusd takes unsigned codes

inline Vec set1(float a) { return _mm512_set1_ps(a); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec abs(Vec a) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), a); }
inline Vec round(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline Vec select_ge(Vec a, Vec b, Vec yes, Vec no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), no, yes);
}

inline Vec pow2(Vec n) {
  const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
}

inline Vec load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

inline Vec load_bf16(const uint16_t* p) {
  const __m512i halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(halves, 16));
}

inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }

inline void store_f16(uint16_t* p, Vec a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}

inline void store_i8(int8_t* p, Vec a) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
}

inline float reduce_add(Vec a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline float reduce_max(Vec a) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline float reduce_max_abs(Vec a, Vec b) {
  const __m512i sixteen = _mm512_max_epi32(_mm512_castps_si512(abs(a)), _mm512_castps_si512(abs(b)));
  const __m256i eight = _mm256_max_epi32(_mm512_castsi512_si256(sixteen), _mm512_extracti32x8_epi32(sixteen, 1));
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1))));
}

inline IVec iset1(int32_t a) { return _mm512_set1_epi32(a); }
inline IVec iload(const int32_t* p) { return _mm512_loadu_si512(p); }
inline IVec iload_i8(const int8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline void istore(int32_t* p, IVec a) { _mm512_storeu_si512(p, a); }
inline IVec iand(IVec a, IVec b) { return _mm512_and_si512(a, b); }
inline IVec ishift_right(IVec a, int bits) { return _mm512_srai_epi32(a, unsigned(bits)); }
inline IVec ishift_left(IVec a, int bits) { return _mm512_slli_epi32(a, unsigned(bits)); }
inline IVec iadd(IVec a, IVec b) { return _mm512_add_epi32(a, b); }
inline IVec isub(IVec a, IVec b) { return _mm512_sub_epi32(a, b); }
inline IVec imul(IVec a, IVec b) { return _mm512_mullo_epi32(a, b); }
inline Vec to_float(IVec a) { return _mm512_cvtepi32_ps(a); }

inline __m512i broadcast4(const int8_t* a) {
  int32_t four;
  __builtin_memcpy(&four, a, 4);
  return _mm512_set1_epi32(four);
}

inline Bytes bload(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void bstore(uint8_t* p, Bytes a) { _mm512_storeu_si512(p, a); }
inline Bytes bor(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
inline Bytes offset(Bytes a) { return _mm512_xor_si512(a, _mm512_set1_epi8(char(kByteOffset))); }
inline Bytes load_table(const uint8_t* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)); }
inline Bytes look_up(Bytes table, Bytes codes) { return _mm512_shuffle_epi8(table, codes); }

inline Bytes field(Bytes a, int from, int width, int to) {
  typedef uint16_t Words __attribute__((vector_size(64)));
  const Bytes moved = from > to ? Bytes(Words(a) >> (from - to)) : Bytes(Words(a) << (to - from));
  return _mm512_and_si512(moved, _mm512_set1_epi8(char(((1 << width) - 1) << to)));
}

inline IVec add_dot(IVec sum, Bytes codes, const int8_t* a) { return _mm512_dpbusd_epi32(sum, codes, broadcast4(a)); }

#include "cpu/isa/vnni_dot_rows.h"
