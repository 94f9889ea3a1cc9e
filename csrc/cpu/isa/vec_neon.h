// 16 lanes as four 128-bit registers, byte dot products by sdot, or by smmla where the file is compiled for it.
// Included inside an anonymous namespace; contracts are in vec_scalar.h.

struct Vec { float32x4_t v[4]; };
struct IVec { int32x4_t v[4]; };
struct Bytes { uint8x16_t v[4]; };

constexpr int kRows = 4;
constexpr int kDirectRows = 8;
constexpr int kColumnVecs = 1;
constexpr int kScoreVecs = 2;
constexpr int kByteOffset = 0;  // sdot takes signed codes, and those of fewer bits are below 128

// f(i) for each quarter: 4 lanes.
template <class F>
inline Vec quarters(F f) { return {{f(0), f(1), f(2), f(3)}}; }

template <class F>
inline IVec iquarters(F f) { return {{f(0), f(1), f(2), f(3)}}; }

template <class F>
inline Bytes bquarters(F f) { return {{f(0), f(1), f(2), f(3)}}; }

// Not vmaxq_f32 and vminq_f32, which give NaN where either argument is one.
inline float32x4_t max(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline float32x4_t min(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }

inline Vec set1(float a) { return quarters([=](int) { return vdupq_n_f32(a); }); }
inline Vec load(const float* p) { return quarters([=](int i) { return vld1q_f32(p + 4 * i); }); }
inline Vec add(Vec a, Vec b) { return quarters([=](int i) { return vaddq_f32(a.v[i], b.v[i]); }); }
inline Vec sub(Vec a, Vec b) { return quarters([=](int i) { return vsubq_f32(a.v[i], b.v[i]); }); }
inline Vec mul(Vec a, Vec b) { return quarters([=](int i) { return vmulq_f32(a.v[i], b.v[i]); }); }
inline Vec div(Vec a, Vec b) { return quarters([=](int i) { return vdivq_f32(a.v[i], b.v[i]); }); }
inline Vec fma(Vec a, Vec b, Vec c) { return quarters([=](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); }); }
inline Vec max(Vec a, Vec b) { return quarters([=](int i) { return max(a.v[i], b.v[i]); }); }
inline Vec min(Vec a, Vec b) { return quarters([=](int i) { return min(a.v[i], b.v[i]); }); }
inline Vec abs(Vec a) { return quarters([=](int i) { return vabsq_f32(a.v[i]); }); }
inline Vec round(Vec a) { return quarters([=](int i) { return vrndnq_f32(a.v[i]); }); }

inline Vec select_ge(Vec a, Vec b, Vec yes, Vec no) {
  return quarters([=](int i) { return vbslq_f32(vcgeq_f32(a.v[i], b.v[i]), yes.v[i], no.v[i]); });
}

inline Vec pow2(Vec n) {
  return quarters([=](int i) {
    const int32x4_t exponent = vaddq_s32(vcvtq_s32_f32(n.v[i]), vdupq_n_s32(127));
    return vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23));
  });
}

inline Vec load_f16(const uint16_t* p) {
  return quarters([=](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}

inline Vec load_bf16(const uint16_t* p) {
  return quarters([=](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
}

inline void store(float* p, Vec a) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}

inline void store_f16(uint16_t* p, Vec a) {
  for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}

inline void store_i8(int8_t* p, Vec a) {
  const IVec whole = iquarters([=](int i) { return vcvtq_s32_f32(a.v[i]); });
  const int16x8_t low = vcombine_s16(vmovn_s32(whole.v[0]), vmovn_s32(whole.v[1]));
  const int16x8_t high = vcombine_s16(vmovn_s32(whole.v[2]), vmovn_s32(whole.v[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

inline float reduce_add(Vec a) {
  const float32x4_t four = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

inline float reduce_max(Vec a) {
  const float32x4_t four = max(max(a.v[0], a.v[2]), max(a.v[1], a.v[3]));
  const float32x4_t two = max(four, vextq_f32(four, four, 2));
  return vgetq_lane_f32(max(two, vextq_f32(two, two, 1)), 0);
}

inline float reduce_max_abs(Vec a, Vec b) {
  uint32x4_t largest = vdupq_n_u32(0);
  for (int i = 0; i < 4; ++i) {
    largest = vmaxq_u32(largest, vreinterpretq_u32_f32(vabsq_f32(a.v[i])));
    largest = vmaxq_u32(largest, vreinterpretq_u32_f32(vabsq_f32(b.v[i])));
  }
  return vgetq_lane_f32(vreinterpretq_f32_u32(vdupq_n_u32(vmaxvq_u32(largest))), 0);
}

inline IVec iset1(int32_t a) { return iquarters([=](int) { return vdupq_n_s32(a); }); }
inline IVec iload(const int32_t* p) { return iquarters([=](int i) { return vld1q_s32(p + 4 * i); }); }

inline IVec iload_i8(const int8_t* p) {
  const int8x16_t bytes = vld1q_s8(p);
  const int16x8_t halves[2] = {vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes))};
  return iquarters([=](int i) {
    return vmovl_s16(i % 2 ? vget_high_s16(halves[i / 2]) : vget_low_s16(halves[i / 2]));
  });
}

inline void istore(int32_t* p, IVec a) {
  for (int i = 0; i < 4; ++i) vst1q_s32(p + 4 * i, a.v[i]);
}

inline IVec iand(IVec a, IVec b) { return iquarters([=](int i) { return vandq_s32(a.v[i], b.v[i]); }); }
inline IVec ishift_right(IVec a, int bits) {
  return iquarters([=](int i) { return vshlq_s32(a.v[i], vdupq_n_s32(-bits)); });
}

inline IVec ishift_left(IVec a, int bits) {
  return iquarters([=](int i) { return vshlq_s32(a.v[i], vdupq_n_s32(bits)); });
}

inline IVec iadd(IVec a, IVec b) { return iquarters([=](int i) { return vaddq_s32(a.v[i], b.v[i]); }); }
inline IVec isub(IVec a, IVec b) { return iquarters([=](int i) { return vsubq_s32(a.v[i], b.v[i]); }); }
inline IVec imul(IVec a, IVec b) { return iquarters([=](int i) { return vmulq_s32(a.v[i], b.v[i]); }); }
inline Vec to_float(IVec a) { return quarters([=](int i) { return vcvtq_f32_s32(a.v[i]); }); }

inline Bytes bload(const uint8_t* p) { return bquarters([=](int i) { return vld1q_u8(p + 16 * i); }); }

inline void bstore(uint8_t* p, Bytes a) {
  for (int i = 0; i < 4; ++i) vst1q_u8(p + 16 * i, a.v[i]);
}

inline Bytes bor(Bytes a, Bytes b) { return bquarters([=](int i) { return vorrq_u8(a.v[i], b.v[i]); }); }
inline Bytes offset(Bytes a) { return a; }

inline Bytes field(Bytes a, int from, int width, int to) {
  const uint8x16_t mask = vdupq_n_u8(uint8_t(((1 << width) - 1) << to));
  return bquarters([=](int i) { return vandq_u8(vshlq_u8(a.v[i], vdupq_n_s8(int8_t(to - from))), mask); });
}

inline Bytes load_table(const uint8_t* p) {
  const uint8x16_t values = vld1q_u8(p);
  return bquarters([=](int) { return values; });
}

inline Bytes look_up(Bytes table, Bytes codes) {
  return bquarters([=](int i) { return vqtbl1q_u8(table.v[i], codes.v[i]); });
}

// One group of 4 k for R rows, whose activations are lane Lane of x.
template <int Lane, int R>
inline void dot_group(Bytes codes, const int8x16_t* x, IVec* out) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
    out[r] = iquarters(
        [&](int i) { return vdotq_laneq_s32(out[r].v[i], vreinterpretq_s8_u8(codes.v[i]), x[r], Lane); });
}

#ifdef __ARM_FEATURE_MATMUL_INT8
// Pairs of rows: smmla adds the dot products of 8 k for 2 columns x 2 rows.
template <int Groups, int Pairs, class Group>
inline void dot_row_pairs(const Group& group, const int8_t* a, IVec* out) {
  int32x4_t sum[Pairs][8];  // of columns 2 i and 2 i + 1: both rows of the first, both of the second
#pragma GCC unroll 8
  for (int p = 0; p < Pairs; ++p)
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) sum[p][i] = vdupq_n_s32(0);
#pragma GCC unroll 8
  for (int g = 0; g < Groups; g += 2) {
    int8x16_t x[Pairs];
#pragma GCC unroll 8
    for (int p = 0; p < Pairs; ++p) x[p] = vcombine_s8(vld1_s8(a + 64 * p + 4 * g), vld1_s8(a + 64 * p + 32 + 4 * g));
    const Bytes low = group(g), high = group(g + 1);
#pragma GCC unroll 8
    for (int i = 0; i < 4; ++i) {
      const uint32x4_t l = vreinterpretq_u32_u8(low.v[i]), h = vreinterpretq_u32_u8(high.v[i]);
      const int8x16_t w[2] = {vreinterpretq_s8_u32(vzip1q_u32(l, h)), vreinterpretq_s8_u32(vzip2q_u32(l, h))};
#pragma GCC unroll 8
      for (int p = 0; p < Pairs; ++p) {
        sum[p][2 * i] = vmmlaq_s32(sum[p][2 * i], w[0], x[p]);
        sum[p][2 * i + 1] = vmmlaq_s32(sum[p][2 * i + 1], w[1], x[p]);
      }
    }
  }
#pragma GCC unroll 8
  for (int p = 0; p < Pairs; ++p) {
    out[2 * p] = iquarters([&](int i) { return vuzp1q_s32(sum[p][2 * i], sum[p][2 * i + 1]); });
    out[2 * p + 1] = iquarters([&](int i) { return vuzp2q_s32(sum[p][2 * i], sum[p][2 * i + 1]); });
  }
}
#endif

template <int Bits, int Groups, int R, class Group>
inline void dot_rows(const Group& group, const int8_t* a, IVec* out) {
#ifdef __ARM_FEATURE_MATMUL_INT8
  if constexpr (R % 2 == 0) return dot_row_pairs<Groups, R / 2>(group, a, out);
#endif
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) out[r] = iset1(0);
#pragma GCC unroll 8
  for (int g = 0; g < Groups; g += 4) {
    int8x16_t x[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) x[r] = vld1q_s8(a + 32 * r + 4 * g);
    dot_group<0, R>(group(g), x, out);
    dot_group<1, R>(group(g + 1), x, out);
    dot_group<2, R>(group(g + 2), x, out);
    dot_group<3, R>(group(g + 3), x, out);
  }
}
