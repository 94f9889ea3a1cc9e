// 16 lanes in plain C++: what every other vec_*.h must repeat bit for bit. Included inside an anonymous namespace.

struct Vec { float v[16]; };
struct IVec { int32_t v[16]; };

constexpr int kRows = 4;        // rows multiplied together, as registers allow
constexpr int kColumnVecs = 1;  // vectors of V weighed together, likewise
constexpr int kByteOffset = 0;  // added to signed 8-bit codes when they are unpacked, where dot_rows wants unsigned ones

#define RVLLM_LANES(expr)                        \
  Vec out;                                       \
  for (int i = 0; i < 16; ++i) out.v[i] = expr;  \
  return out

inline Vec set1(float a) { RVLLM_LANES(a); }
inline Vec load(const float* p) { RVLLM_LANES(p[i]); }
inline Vec add(Vec a, Vec b) { RVLLM_LANES(a.v[i] + b.v[i]); }
inline Vec sub(Vec a, Vec b) { RVLLM_LANES(a.v[i] - b.v[i]); }
inline Vec mul(Vec a, Vec b) { RVLLM_LANES(a.v[i] * b.v[i]); }
inline Vec div(Vec a, Vec b) { RVLLM_LANES(a.v[i] / b.v[i]); }
inline Vec fma(Vec a, Vec b, Vec c) { RVLLM_LANES(__builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
inline Vec max(Vec a, Vec b) { RVLLM_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline Vec min(Vec a, Vec b) { RVLLM_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline Vec abs(Vec a) { RVLLM_LANES(__builtin_fabsf(a.v[i])); }
inline Vec round(Vec a) { RVLLM_LANES(__builtin_rintf(a.v[i])); }  // to nearest even
inline Vec select_ge(Vec a, Vec b, Vec yes, Vec no) { RVLLM_LANES(a.v[i] >= b.v[i] ? yes.v[i] : no.v[i]); }
#undef RVLLM_LANES

// 2^n for whole n in [-126, 127].
inline Vec pow2(Vec n) {
  Vec out;
  for (int i = 0; i < 16; ++i) {
    const int32_t bits = (int32_t(n.v[i]) + 127) << 23;
    __builtin_memcpy(&out.v[i], &bits, 4);
  }
  return out;
}

inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  uint32_t bits = sign | (exponent + 112) << 23 | mantissa << 13;
  if (exponent == 31) bits = sign | 0x7f800000u | mantissa << 13;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  if (exponent == 0) f = (sign ? -1.0f : 1.0f) * (float(mantissa) * 0x1p-24f);
  return f;
}

inline uint16_t float_to_half(float f) {
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return uint16_t(sign | 0x7e00 | (bits >> 13 & 0x3ff));
  if (bits >= 0x47800000) return sign | 0x7c00;
  if (bits < 0x38800000) {  // subnormal f16: adding 0.5, whose ulp is 2^-24, rounds
    float magnitude;
    __builtin_memcpy(&magnitude, &bits, 4);
    const float shifted = magnitude + 0.5f;
    uint32_t rounded;
    __builtin_memcpy(&rounded, &shifted, 4);
    return sign | uint16_t(rounded - 0x3f000000);
  }
  return sign | uint16_t((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

inline Vec load_f16(const uint16_t* p) {
  Vec out;
  for (int i = 0; i < 16; ++i) out.v[i] = half_to_float(p[i]);
  return out;
}

inline Vec load_bf16(const uint16_t* p) {
  Vec out;
  for (int i = 0; i < 16; ++i) {
    const uint32_t bits = uint32_t(p[i]) << 16;
    __builtin_memcpy(&out.v[i], &bits, 4);
  }
  return out;
}

inline void store(float* p, Vec a) {
  for (int i = 0; i < 16; ++i) p[i] = a.v[i];
}

inline void store_f16(uint16_t* p, Vec a) {
  for (int i = 0; i < 16; ++i) p[i] = float_to_half(a.v[i]);
}

// Whole numbers in [-128, 127].
inline void store_i8(int8_t* p, Vec a) {
  for (int i = 0; i < 16; ++i) p[i] = int8_t(a.v[i]);
}

inline float reduce_add(Vec a) {
  for (int span = 8; span > 0; span /= 2)
    for (int i = 0; i < span; ++i) a.v[i] += a.v[i + span];
  return a.v[0];
}

inline float reduce_max(Vec a) {
  for (int span = 8; span > 0; span /= 2)
    for (int i = 0; i < span; ++i) a.v[i] = a.v[i] > a.v[i + span] ? a.v[i] : a.v[i + span];
  return a.v[0];
}

inline IVec iset1(int32_t a) {
  IVec out;
  for (int i = 0; i < 16; ++i) out.v[i] = a;
  return out;
}

inline IVec iload(const int32_t* p) {
  IVec out;
  for (int i = 0; i < 16; ++i) out.v[i] = p[i];
  return out;
}

inline IVec iadd(IVec a, IVec b) {
  for (int i = 0; i < 16; ++i) a.v[i] += b.v[i];
  return a;
}

inline IVec isub(IVec a, IVec b) {
  for (int i = 0; i < 16; ++i) a.v[i] -= b.v[i];
  return a;
}

inline IVec imul(IVec a, IVec b) {
  for (int i = 0; i < 16; ++i) a.v[i] *= b.v[i];
  return a;
}

inline Vec to_float(IVec a) {
  Vec out;
  for (int i = 0; i < 16; ++i) out.v[i] = float(a.v[i]);
  return out;
}

// out[r].lane c = sum over the groups of 4 k: codes[group][c][i] * a[r * stride + 4 * group + i].
// Codes of 8 bits are signed (unsigned where kByteOffset is not 0), smaller ones unsigned.
template <int Bits, int Groups, int R>
inline void dot_rows(const uint8_t* codes, const int8_t* a, int64_t stride, IVec* out) {
  for (int r = 0; r < R; ++r) {
    out[r] = iset1(0);
    for (int g = 0; g < Groups; ++g)
      for (int c = 0; c < 16; ++c)
        for (int i = 0; i < 4; ++i) {
          const uint8_t code = codes[64 * g + 4 * c + i];
          out[r].v[c] += (Bits == 8 ? int(int8_t(code)) : int(code)) * a[r * stride + 4 * g + i];
        }
  }
}
