// Everything but the matrix products, written once over Vec. Included inside an anonymous namespace.
// Sums run over 16 lanes, element i in lane i % 16, and the lanes are added as a tree: the same bits on every ISA.

inline Vec load_partial(const float* p, int n, float fill) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = i < n ? p[i] : fill;
  return load(lanes);
}

inline void store_partial(float* p, Vec a, int n) {
  float lanes[16];
  store(lanes, a);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

// exp within 1.2e-7 relative; exactly 0 from -87 down, where float32 nears its subnormals. NaN stays NaN, for which the
// order of arguments matters: min and max give the second one where either is NaN.
inline Vec exp(Vec x) {
  const Vec lowest = set1(-87.0f);
  const Vec clamped = min(set1(88.0f), max(lowest, x));
  const Vec n = round(mul(clamped, set1(1.44269504088896341f)));
  Vec r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  Vec p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, set1(1.0f)));
  return select_ge(lowest, x, set1(0.0f), mul(p, pow2(n)));
}

inline float exp(float x) {
  float lanes[16];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
  Vec squares = set1(0.0f);
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const Vec v = load(x + i);
    squares = fma(v, v, squares);
  }
  if (i < n) {
    const Vec v = load_partial(x + i, n - i, 0.0f);
    squares = fma(v, v, squares);
  }
  const float factor = 1.0f / __builtin_sqrtf(reduce_add(squares) / float(n) + eps);
  for (int j = 0; j < n; ++j) out[j] = x[j] * factor * weight[j];
}

void rope(float* x, int heads, int head_dim, int dim, bool interleaved, const float* cos_sin) {
  const int half = dim / 2;
  const int step = interleaved ? 2 : 1, other = interleaved ? 1 : half;
  for (int h = 0; h < heads; ++h, x += head_dim)
    for (int i = 0; i < half; ++i) {
      const float c = cos_sin[i], s = cos_sin[half + i];
      float& a = x[step * i];
      float& b = x[step * i + other];
      const float rotated = a * c - b * s;
      b = a * s + b * c;
      a = rotated;
    }
}

inline Vec gate(Vec x, Activation act) {
  // Both are x times a logistic function: silu of x, gelu's tanh form of 2 sqrt(2 / pi) (x + 0.044715 x^3).
  Vec z = x;
  if (act == Activation::kGelu)
    z = mul(set1(1.5957691216057308f), fma(mul(mul(x, x), x), set1(0.044715f), x));
  return div(x, add(set1(1.0f), exp(sub(set1(0.0f), z))));
}

void gated_activation(const float* g, const float* up, Activation act, int n, float* out) {
  int i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, mul(gate(load(g + i), act), load(up + i)));
  if (i < n)
    store_partial(out + i, mul(gate(load_partial(g + i, n - i, 0.0f), act), load_partial(up + i, n - i, 0.0f)), n - i);
}

void add_to(float* x, const float* y, int n) {
  for (int i = 0; i < n; ++i) x[i] += y[i];
}

void scale_by(float* x, float factor, int n) {
  for (int i = 0; i < n; ++i) x[i] *= factor;
}

// Saturates beyond f16; what is no finite number becomes NaN, so that nobody who attends to it overlooks it.
inline Vec storable(Vec x) {
  const Vec saturated = min(max(x, set1(-65504.0f)), set1(65504.0f));
  return select_ge(set1(3.40282347e38f), abs(x), saturated, set1(__builtin_nanf("")));
}

void store_kv(const float* k, const float* v, int head_dim, int block_size, int slot, uint16_t* k_block,
              uint16_t* v_block) {
  for (int d = 0; d < head_dim; d += 16) {
    const int n = head_dim - d < 16 ? head_dim - d : 16;
    uint16_t halves[32];
    store_f16(halves, storable(load_partial(k + d, n, 0.0f)));
    store_f16(halves + 16, storable(load_partial(v + d, n, 0.0f)));
    for (int i = 0; i < n; ++i) {
      k_block[int64_t(d + i) * block_size + slot] = halves[i];
      v_block[int64_t(slot) * head_dim + d + i] = halves[16 + i];
    }
  }
}

// The 16 values of K at dimension d of the positions from p on: one load where they lie in one block.
inline Vec load_keys(const AttentionArgs& args, int p, int to, int d) {
  const int block_size = args.block_size;
  uint16_t lanes[16] = {};
  for (int i = 0; i < 16 && p + i < to; ++i)
    lanes[i] = args.k_cache[args.block_table[(p + i) / block_size] * args.block_stride + int64_t(d) * block_size +
                            (p + i) % block_size];
  return load_f16(lanes);
}

// scores[r][p - begin] = q[r] . K[p] * scale for R rows and the 16 P positions from p on, or as many as there are.
template <int R, int P>
inline void score_positions(const AttentionArgs& args, int row, int begin, int p, int to, float (*scores)[kPartition]) {
  const int block_size = args.block_size;
  const bool whole = block_size % 16 == 0;
  const uint16_t* keys[P];
  for (int i = 0; i < P; ++i) {
    const int position = p + 16 * i;
    keys[i] = args.k_cache + args.block_table[position / block_size] * args.block_stride + position % block_size;
  }
  Vec sum[P][R];
#pragma GCC unroll 8
  for (int i = 0; i < P; ++i)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum[i][r] = set1(0.0f);
  for (int d = 0; d < args.head_dim; ++d) {
    Vec k[P];
#pragma GCC unroll 8
    for (int i = 0; i < P; ++i)
      k[i] = whole ? load_f16(keys[i] + int64_t(d) * block_size) : load_keys(args, p + 16 * i, to, d);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec q = set1(args.q[row + r][d]);
#pragma GCC unroll 8
      for (int i = 0; i < P; ++i) sum[i][r] = fma(q, k[i], sum[i][r]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < P; ++i) {
      Vec s = mul(sum[i][r], set1(args.scale));
      if (args.soft_cap > 0.0f) {  // cap * tanh(s / cap)
        const Vec e = exp(mul(s, set1(2.0f / args.soft_cap)));
        s = mul(set1(args.soft_cap), sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f)))));
      }
      store(scores[row + r] + p + 16 * i - begin, s);
    }
}

// Scores of R rows at the positions [from, to) of a partition; from is a multiple of 16.
template <int R>
void score_rows(const AttentionArgs& args, int row, int begin, int from, int to, float (*scores)[kPartition]) {
  int p = from;
  for (; p + 16 < to; p += 32) score_positions<R, 2>(args, row, begin, p, to, scores);
  if (p < to) score_positions<R, 1>(args, row, begin, p, to, scores);
}

// Turns a row's scores into weights exp(s - largest); positions out of sight weigh 0, and total 0 says that all are.
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

// values[r][d..] = sum over p of weights[r][p] * V[p][d..] for R rows and 16 C dimensions from d on, or as many as there
// are; positions in ascending order.
template <int R, int C>
inline void weigh_columns(const AttentionArgs& args, int row, int begin, int from, int to,
                          const float (*weights)[kPartition], float* values, int d) {
  const bool whole = d + 16 * C <= args.head_dim;
  Vec sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = set1(0.0f);
  for (int p = from; p < to;) {
    const int offset = p % args.block_size;
    const int run = args.block_size - offset < to - p ? args.block_size - offset : to - p;
    const uint16_t* rows =
        args.v_cache + args.block_table[p / args.block_size] * args.block_stride + int64_t(offset) * args.head_dim + d;
    for (int i = 0; i < run; ++i, rows += args.head_dim) {
      Vec v[C];
      if (whole) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) v[c] = load_f16(rows + 16 * c);
      } else {
        uint16_t lanes[16 * C] = {};
        for (int j = 0; d + j < args.head_dim; ++j) lanes[j] = rows[j];
        for (int c = 0; c < C; ++c) v[c] = load_f16(lanes + 16 * c);
      }
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
    for (int c = 0; c < C; ++c) store(values + (row + r) * int64_t(padded_head_dim(args.head_dim)) + d + 16 * c, sum[r][c]);
}

template <int R>
void weigh_values(const AttentionArgs& args, int row, int begin, int from, int to, const float (*weights)[kPartition],
                  float* values) {
  int d = 0;
  for (; d + 16 * kColumnVecs <= args.head_dim; d += 16 * kColumnVecs)
    weigh_columns<R, kColumnVecs>(args, row, begin, from, to, weights, values, d);
  for (; d < args.head_dim; d += 16) weigh_columns<R, 1>(args, row, begin, from, to, weights, values, d);
}

struct Score {
  const AttentionArgs& args;
  int begin, from, to;
  float (*scores)[kPartition];
  template <int R>
  void operator()(int row) const { score_rows<R>(args, row, begin, from, to, scores); }
};

struct Weigh {
  const AttentionArgs& args;
  int begin, from, to;
  const float (*weights)[kPartition];
  float* values;
  template <int R>
  void operator()(int row) const { weigh_values<R>(args, row, begin, from, to, weights, values); }
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

void attend_partition(const AttentionArgs& args, int begin, const AttentionPart& out) {
  float scores[kMaxQueryRows][kPartition];
  int first = args.first[0], last = args.last[0];
  for (int r = 1; r < args.rows; ++r) {
    if (args.first[r] < first) first = args.first[r];
    if (args.last[r] > last) last = args.last[r];
  }
  const int from = first > begin ? first / 16 * 16 : begin;
  const int to = last < begin + kPartition ? last : begin + kPartition;
  for_row_groups(args.rows, Score{args, begin, from, to, scores});
  for (int r = 0; r < args.rows; ++r) soften(args, r, begin, from, to, scores[r], out.largest + r, out.total + r);
  for_row_groups(args.rows, Weigh{args, begin, from, to, scores, out.values});
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
