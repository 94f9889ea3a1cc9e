// Attention over blocks of keys and values, written once over Vec. Included inside an anonymous namespace, after
// float_kernels.inl.

inline uint16_t to_bf16(float f) {
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Saturates beyond f16; what is no finite number becomes NaN, so that nobody who attends to it overlooks it.
inline Vec storable(Vec x) {
  const Vec saturated = min(max(x, set1(-65504.0f)), set1(65504.0f));
  return select_ge(set1(3.40282347e38f), abs(x), saturated, set1(__builtin_nanf("")));
}

struct CacheF32 {
  using Element = float;
  static constexpr KVType kType = KVType::kF32;
  static constexpr bool kScaled = false;
  static Vec widen(const float* p) { return load(p); }
};

struct CacheF16 {
  using Element = uint16_t;
  static constexpr KVType kType = KVType::kF16;
  static constexpr bool kScaled = false;
  static Vec widen(const uint16_t* p) { return load_f16(p); }
};

struct CacheBF16 {
  using Element = uint16_t;
  static constexpr KVType kType = KVType::kBF16;
  static constexpr bool kScaled = false;
  static Vec widen(const uint16_t* p) { return load_bf16(p); }
};

struct CacheQ8 {
  using Element = int8_t;
  static constexpr KVType kType = KVType::kQ8_0;
  static constexpr bool kScaled = true;
  static Vec widen(const int8_t* p) { return to_float(iload_i8(p)); }
};

// An infinite key would pass for one that is merely far away.
inline float finite_or_nan(float x) { return x - x == 0.0f ? x : __builtin_nanf(""); }

inline void store_elements(CacheF32, const float* x, int n, float* out, int stride) {
  for (int i = 0; i < n; ++i) out[int64_t(i) * stride] = finite_or_nan(x[i]);
}

inline void store_elements(CacheBF16, const float* x, int n, uint16_t* out, int stride) {
  for (int i = 0; i < n; ++i) out[int64_t(i) * stride] = to_bf16(finite_or_nan(x[i]));
}

inline void store_elements(CacheF16, const float* x, int n, uint16_t* out, int stride) {
  for (int d = 0; d < n; d += 16) {
    const int count = n - d < 16 ? n - d : 16;
    uint16_t halves[16];
    store_f16(halves, storable(load_partial(x + d, count, 0.0f)));
    for (int i = 0; i < count; ++i) out[int64_t(d + i) * stride] = halves[i];
  }
}

// One scale for each 32 elements; not a number if one of them is infinite or not a number.
inline void store_elements(CacheQ8, const float* x, int n, int8_t* out, int stride, float* scales, int scale_stride) {
  for (int d = 0; d < n; d += kKVScaleBlock) {
    const int count = n - d < kKVScaleBlock ? n - d : kKVScaleBlock;
    float largest = 0.0f, poison = 0.0f;
    for (int i = 0; i < count; ++i) {
      const float magnitude = __builtin_fabsf(x[d + i]);
      if (magnitude > largest) largest = magnitude;
      poison += x[d + i] * 0.0f;
    }
    const bool finite = poison == 0.0f;
    const float inverse = finite && largest > 1e-30f ? 127.0f / largest : 0.0f;  // never infinite
    // One NaN everywhere.
    scales[int64_t(d / kKVScaleBlock) * scale_stride] = finite ? largest / 127.0f : __builtin_nanf("");
    for (int i = 0; i < count; ++i)
      out[int64_t(d + i) * stride] = finite ? int8_t(__builtin_rintf(x[d + i] * inverse)) : int8_t(0);
  }
}

template <class Cache>
void store_kv(const float* k, const float* v, int head_dim, int block_size, int slot, uint8_t* block) {
  using Element = typename Cache::Element;
  uint8_t* const v_block = block + kv_matrix_bytes(Cache::kType, head_dim, block_size);
  Element* const keys = reinterpret_cast<Element*>(block) + slot;
  Element* const values = reinterpret_cast<Element*>(v_block) + int64_t(slot) * head_dim;
  if constexpr (Cache::kScaled) {
    const int64_t codes = kv_code_bytes(Cache::kType, head_dim, block_size);
    float* const k_scales = reinterpret_cast<float*>(block + codes) + slot;
    const int64_t scales = (head_dim + kKVScaleBlock - 1) / kKVScaleBlock;
    float* const v_scales = reinterpret_cast<float*>(v_block + codes) + slot * scales;
    store_elements(Cache(), k, head_dim, keys, block_size, k_scales, block_size);
    store_elements(Cache(), v, head_dim, values, 1, v_scales, 1);
  } else {
    store_elements(Cache(), k, head_dim, keys, block_size);
    store_elements(Cache(), v, head_dim, values, 1);
  }
}

inline const uint8_t* block_of(const AttentionArgs& args, int position) {
  return args.cache.block(args.block_table[position / args.block_size]);
}

// The 16 entries of row `row`, of rows of block_size, at the positions from p on, whatever blocks they lie in; those
// outside [from, to) are left.
template <class Element>
inline void gather_row(const AttentionArgs& args, int64_t offset, int row, int p, int from, int to, Element* lanes) {
  for (int i = p < from ? from - p : 0; i < 16 && p + i < to; ++i)
    lanes[i] = reinterpret_cast<const Element*>(block_of(args, p + i) + offset)[int64_t(row) * args.block_size +
                                                                                (p + i) % args.block_size];
}

constexpr int kKeysAhead = 64;  // positions

// scores[r][p - begin] = q[r] . K[p] * scale for R rows and the 16 P positions from p on, or as many as there are.
// Prefetch: meanwhile asks for the values of these and for keys of later ones; the processor's own streams end with a
// page.
template <class Cache, int R, int P, bool Prefetch>
inline void score_positions(const AttentionArgs& args, int row, int begin, int p, int from, int to,
                            float (*scores)[kPartition]) {
  using Element = typename Cache::Element;
  const int block_size = args.block_size;
  const int64_t codes = kv_code_bytes(Cache::kType, args.head_dim, block_size);
  const bool whole = block_size % 16 == 0;
  const Element* keys[P] = {};
  const float* scales[P] = {};
  const Element *later_keys[P] = {}, *values[P] = {};
  for (int i = 0; i < P && whole; ++i) {
    const int position = p + 16 * i;
    const uint8_t* block = block_of(args, position);
    if constexpr (Prefetch) {
      const int later = position + kKeysAhead < args.last[0] ? position + kKeysAhead : position;
      later_keys[i] = reinterpret_cast<const Element*>(block_of(args, later)) + later % block_size;
      values[i] = reinterpret_cast<const Element*>(block + kv_matrix_bytes(Cache::kType, args.head_dim, block_size)) +
                  int64_t(position % block_size) * args.head_dim;
    }
    keys[i] = reinterpret_cast<const Element*>(block) + position % block_size;
    scales[i] = reinterpret_cast<const float*>(block + codes) + position % block_size;
  }
  Vec sum[P][R];
#pragma GCC unroll 8
  for (int i = 0; i < P; ++i)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum[i][r] = set1(0.0f);
  for (int first = 0; first < args.head_dim; first += kKVScaleBlock) {
    Vec scale[P];
    if constexpr (Cache::kScaled)
      for (int i = 0; i < P; ++i) {
        float lanes[16] = {};
        if (!whole) gather_row(args, codes, first / kKVScaleBlock, p + 16 * i, from, to, lanes);
        scale[i] = load(whole ? scales[i] + int64_t(first / kKVScaleBlock) * block_size : lanes);
      }
    const int end = first + kKVScaleBlock < args.head_dim ? first + kKVScaleBlock : args.head_dim;
    for (int d = first; d < end; ++d) {
      Vec k[P];
#pragma GCC unroll 8
      for (int i = 0; i < P; ++i) {
        if (whole) {
          k[i] = Cache::widen(keys[i] + int64_t(d) * block_size);
          if constexpr (Prefetch) {
            __builtin_prefetch(later_keys[i] + int64_t(d) * block_size, 0, 2);
            __builtin_prefetch(values[i] + d * 16, 0, 2);
          }
        } else {
          Element lanes[16] = {};
          gather_row(args, 0, d, p + 16 * i, from, to, lanes);
          k[i] = Cache::widen(lanes);
        }
        if constexpr (Cache::kScaled) k[i] = mul(k[i], scale[i]);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Vec q = set1(args.q[row + r][d]);
#pragma GCC unroll 8
        for (int i = 0; i < P; ++i) sum[i][r] = fma(q, k[i], sum[i][r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < P; ++i) {
      Vec s = mul(sum[i][r], set1(args.scale));
      if (args.soft_cap > 0.0f) s = soft_capped(s, args.soft_cap);
      store(scores[row + r] + p + 16 * i - begin, s);
    }
}

// Scores of R rows at the positions [from, to) of a partition, from the multiple of 16 on that is not behind `from`.
template <class Cache, int R, bool Prefetch>
void score_rows(const AttentionArgs& args, int row, int begin, int from, int to, float (*scores)[kPartition]) {
  int p = from / 16 * 16;
  for (; p + 16 * (kScoreVecs - 1) < to; p += 16 * kScoreVecs)
    score_positions<Cache, R, kScoreVecs, Prefetch>(args, row, begin, p, from, to, scores);
  for (; p < to; p += 16) score_positions<Cache, R, 1, Prefetch>(args, row, begin, p, from, to, scores);
}

// Turns a row's scores from `from`, a multiple of 16, on into weights exp(s - largest); positions out of sight weigh 0,
// and total 0 says that all are.
inline void soften(const AttentionArgs& args, int r, int begin, int from, int to, float* scores, float* largest,
                   float* total) {
  const int first = args.first[r] > from ? args.first[r] : from;
  const int last = args.last[r] < to ? args.last[r] : to;
  const int padded = (to + 15) / 16 * 16;
  if (first >= last) {
    for (int p = from; p < padded; ++p) scores[p - begin] = 0.0f;
    *largest = *total = 0.0f;
    return;
  }
  const float hidden = -__builtin_inff();
  for (int p = from; p < first; ++p) scores[p - begin] = hidden;
  for (int p = last; p < padded; ++p) scores[p - begin] = hidden;
  Vec m = set1(hidden);
  for (int p = from; p < padded; p += 16) m = max(load(scores + p - begin), m);
  *largest = reduce_max(m);
  Vec sum = set1(0.0f);
  for (int p = from; p < padded; p += 16) {
    const Vec e = exp(sub(load(scores + p - begin), set1(*largest)));
    store(scores + p - begin, e);
    sum = add(sum, e);
  }
  *total = reduce_add(sum);
}

// values[r][d..] = sum over p of weights[r][p] * V[p][d..] for R rows and 16 C dimensions from d on, or as many as
// there are; positions in ascending order. Prefetch: meanwhile asks for the keys of the next partition.
template <class Cache, int R, int C, bool Prefetch>
inline void weigh_columns(const AttentionArgs& args, int row, int begin, int from, int to,
                          const float (*weights)[kPartition], float* values, int d) {
  using Element = typename Cache::Element;
  const bool whole = d + 16 * C <= args.head_dim;
  const int scales_per_row = (args.head_dim + kKVScaleBlock - 1) / kKVScaleBlock;
  const int64_t v_offset = kv_matrix_bytes(Cache::kType, args.head_dim, args.block_size);
  const int64_t codes = kv_code_bytes(Cache::kType, args.head_dim, args.block_size);
  Vec sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = set1(0.0f);
  for (int p = from; p < to;) {
    const int offset = p % args.block_size;
    const int run = args.block_size - offset < to - p ? args.block_size - offset : to - p;
    const uint8_t* block = block_of(args, p) + v_offset;
    const Element* rows = reinterpret_cast<const Element*>(block) + int64_t(offset) * args.head_dim + d;
    const float* scales = reinterpret_cast<const float*>(block + codes) + int64_t(offset) * scales_per_row;
    const Element* later_keys = nullptr;
    if constexpr (Prefetch) {
      const int later = p + kPartition < args.last[0] ? p + kPartition : p;
      later_keys = reinterpret_cast<const Element*>(block_of(args, later)) + int64_t(offset) * args.head_dim + d;
    }
    for (int i = 0; i < run; ++i, rows += args.head_dim, scales += scales_per_row) {
      if constexpr (Prefetch) {
#pragma GCC unroll 8
        for (int c = 0; c < 16 * C; c += 64 / int(sizeof(Element))) __builtin_prefetch(later_keys + c, 0, 2);
        later_keys += args.head_dim;
      }
      Vec v[C];
      if (whole) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) v[c] = Cache::widen(rows + 16 * c);
      } else {
        Element lanes[16 * C] = {};
        for (int j = 0; d + j < args.head_dim; ++j) lanes[j] = rows[j];
        for (int c = 0; c < C; ++c) v[c] = Cache::widen(lanes + 16 * c);
      }
      if constexpr (Cache::kScaled)
        for (int c = 0; c < C; ++c) v[c] = mul(v[c], set1(scales[(d + 16 * c) / kKVScaleBlock]));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Vec w = set1(weights[row + r][p + i - begin]);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sum[r][c] = fma(w, v[c], sum[r][c]);
      }
    }
    p += run;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c)
      store(values + (row + r) * int64_t(padded_head_dim(args.head_dim)) + d + 16 * c, sum[r][c]);
}

template <class Cache, int R, bool Prefetch>
void weigh_values(const AttentionArgs& args, int row, int begin, int from, int to, const float (*weights)[kPartition],
                  float* values) {
  int d = 0;
  for (; d + 16 * kColumnVecs <= args.head_dim; d += 16 * kColumnVecs)
    weigh_columns<Cache, R, kColumnVecs, Prefetch>(args, row, begin, from, to, weights, values, d);
  for (; d < args.head_dim; d += 16)
    weigh_columns<Cache, R, 1, Prefetch>(args, row, begin, from, to, weights, values, d);
}

template <class Cache>
struct Score {
  const AttentionArgs& args;
  int begin, from, to;
  float (*scores)[kPartition];
  template <int R>
  void operator()(int row) const {
    if (row == 0)  // the others find in the cache what these have asked for
      score_rows<Cache, R, true>(args, row, begin, from, to, scores);
    else
      score_rows<Cache, R, false>(args, row, begin, from, to, scores);
  }
};

template <class Cache>
struct Weigh {
  const AttentionArgs& args;
  int begin, from, to;
  const float (*weights)[kPartition];
  float* values;
  template <int R>
  void operator()(int row) const {
    if (row == 0)
      weigh_values<Cache, R, true>(args, row, begin, from, to, weights, values);
    else
      weigh_values<Cache, R, false>(args, row, begin, from, to, weights, values);
  }
};

// Calls f.template operator()<R>(row) over groups of at most four rows.
template <class F>
inline void for_row_groups(int rows, const F& f) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) f.template operator()<4>(r);
  switch (rows - r) {
    case 3: return f.template operator()<3>(r);
    case 2: return f.template operator()<2>(r);
    case 1: return f.template operator()<1>(r);
  }
}

template <class Cache>
void attend_partition(const AttentionArgs& args, int begin, const AttentionPart& out) {
  float scores[kMaxQueryRows][kPartition];
  int first = args.first[0], last = args.last[0];
  for (int r = 1; r < args.rows; ++r) {
    if (args.first[r] < first) first = args.first[r];
    if (args.last[r] > last) last = args.last[r];
  }
  const int from = first > begin ? first : begin;  // what lies before may be gone
  const int to = last < begin + kPartition ? last : begin + kPartition;
  for_row_groups(args.rows, Score<Cache>{args, begin, from, to, scores});
  for (int r = 0; r < args.rows; ++r)
    soften(args, r, begin, from / 16 * 16, to, scores[r], out.largest + r, out.total + r);
  for_row_groups(args.rows, Weigh<Cache>{args, begin, from, to, scores, out.values});
}

void merge_partition(int rows, int head_dim, const AttentionPart& part, const AttentionPart& sum) {
  const int padded_dim = padded_head_dim(head_dim);
  for (int r = 0; r < rows; ++r) {
    if (part.total[r] == 0.0f) continue;
    float keep = 0.0f, take = 1.0f, largest = part.largest[r];
    if (sum.total[r] != 0.0f) {
      largest = sum.largest[r] > part.largest[r] ? sum.largest[r] : part.largest[r];
      keep = exp(sum.largest[r] - largest);
      take = exp(part.largest[r] - largest);
    }
    sum.largest[r] = largest;
    sum.total[r] = __builtin_fmaf(part.total[r], take, sum.total[r] * keep);
    float* out = sum.values + int64_t(r) * padded_dim;
    const float* values = part.values + int64_t(r) * padded_dim;
    for (int d = 0; d < padded_dim; d += 16)
      store(out + d, fma(load(values + d), set1(take), mul(load(out + d), set1(keep))));
  }
}
