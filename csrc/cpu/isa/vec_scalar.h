// 16 lanes in plain C++: what every other vec_*.h must repeat bit for bit. Included inside an anonymous namespace.

struct Vec { float v[16]; };
struct IVec { int32_t v[16]; };
struct Bytes { uint8_t v[64]; };  // a group of codes

constexpr int kRows = 4;        // rows multiplied together, as registers allow
constexpr int kDirectRows = 8;  // rows multiplied by codes as they are packed; for more, unpacking them first pays
constexpr int kColumnVecs = 1;  // vectors of V weighed together, likewise
constexpr int kScoreVecs = 2;   // vectors of scores worked on together, likewise
constexpr int kByteOffset = 0;  // added to signed 8-bit codes when they are unpacked, for a dot_rows of unsigned ones

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

// 2^n for whole n in [-126, 127]; of NaN, 1.
inline Vec pow2(Vec n) {
  Vec out;
  for (int i = 0; i < 16; ++i) {
    const int32_t bits = ((n.v[i] == n.v[i] ? int32_t(n.v[i]) : 0) + 127) << 23;
    __builtin_memcpy(&out.v[i], &bits, 4);
  }
  return out;
}

inline Vec load_f16(const uint16_t* p) {
  Vec out;
  for (int i = 0; i < 16; ++i) out.v[i] = f16_to_f32(p[i]);
  return out;
}

inline Vec load_bf16(const uint16_t* p) {
  Vec out;
  for (int i = 0; i < 16; ++i) out.v[i] = bf16_to_f32(p[i]);
  return out;
}

inline void store(float* p, Vec a) {
  for (int i = 0; i < 16; ++i) p[i] = a.v[i];
}

inline void store_f16(uint16_t* p, Vec a) {
  for (int i = 0; i < 16; ++i) p[i] = f32_to_f16(a.v[i]);
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

// The largest |lane| of a and b, NaN if one of them is: as integers, magnitudes are in order and NaN is above all.
inline float reduce_max_abs(Vec a, Vec b) {
  int32_t largest = 0;
  for (int i = 0; i < 32; ++i) {
    int32_t bits;
    __builtin_memcpy(&bits, i < 16 ? &a.v[i] : &b.v[i - 16], 4);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  float f;
  __builtin_memcpy(&f, &largest, 4);
  return f;
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

inline IVec iload_i8(const int8_t* p) {
  IVec out;
  for (int i = 0; i < 16; ++i) out.v[i] = p[i];
  return out;
}

inline void istore(int32_t* p, IVec a) {
  for (int i = 0; i < 16; ++i) p[i] = a.v[i];
}

inline IVec iand(IVec a, IVec b) {
  for (int i = 0; i < 16; ++i) a.v[i] &= b.v[i];
  return a;
}

inline IVec ishift_right(IVec a, int bits) {
  for (int i = 0; i < 16; ++i) a.v[i] >>= bits;
  return a;
}

inline IVec ishift_left(IVec a, int bits) {
  for (int i = 0; i < 16; ++i) a.v[i] *= 1 << bits;
  return a;
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

inline Bytes bload(const uint8_t* p) {
  Bytes out;
  for (int i = 0; i < 64; ++i) out.v[i] = p[i];
  return out;
}

inline void bstore(uint8_t* p, Bytes a) {
  for (int i = 0; i < 64; ++i) p[i] = a.v[i];
}

inline Bytes bor(Bytes a, Bytes b) {
  for (int i = 0; i < 64; ++i) a.v[i] |= b.v[i];
  return a;
}

inline Bytes offset(Bytes a) {
  for (int i = 0; i < 64; ++i) a.v[i] = uint8_t(a.v[i] + kByteOffset);
  return a;
}

// Of every byte, bits [from, from + width) moved to bits [to, to + width), the others 0.
inline Bytes field(Bytes a, int from, int width, int to) {
  for (int i = 0; i < 64; ++i) a.v[i] = uint8_t((a.v[i] >> from & ((1 << width) - 1)) << to);
  return a;
}

// 16 bytes for look_up.
inline Bytes load_table(const uint8_t* p) {
  Bytes out;
  for (int i = 0; i < 64; ++i) out.v[i] = p[i % 16];
  return out;
}

// Bytes of the table by codes below 16.
inline Bytes look_up(Bytes table, Bytes codes) {
  for (int i = 0; i < 64; ++i) codes.v[i] = table.v[codes.v[i]];
  return codes;
}

// out[r].lane c = sum over the groups of 4 k: group(g)[c][i] * a[32 * r + 4 * g + i].
// Codes of 8 bits are signed (unsigned where kByteOffset is not 0), smaller ones unsigned.
template <int Bits, int Groups, int R, class Group>
inline void dot_rows(const Group& group, const int8_t* a, IVec* out) {
  for (int r = 0; r < R; ++r) out[r] = iset1(0);
  for (int g = 0; g < Groups; ++g) {
    const Bytes codes = group(g);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < 16; ++c)
        for (int i = 0; i < 4; ++i) {
          const uint8_t code = codes.v[4 * c + i];
          out[r].v[c] += (Bits == 8 ? int(int8_t(code)) : int(code)) * a[32 * r + 4 * g + i];
        }
  }
}
