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

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int n, float* out) {
  Vec sum = set1(0.0f), squares = set1(0.0f);
  int i = 0;
  for (; i + 16 <= n; i += 16) sum = add(sum, load(x + i));
  if (i < n) sum = add(sum, load_partial(x + i, n - i, 0.0f));
  const float mean = reduce_add(sum) / float(n);
  for (i = 0; i + 16 <= n; i += 16) {
    const Vec v = sub(load(x + i), set1(mean));
    squares = fma(v, v, squares);
  }
  if (i < n) {
    const Vec v = sub(load_partial(x + i, n - i, mean), set1(mean));
    squares = fma(v, v, squares);
  }
  const float factor = 1.0f / __builtin_sqrtf(reduce_add(squares) / float(n) + eps);
  for (int j = 0; j < n; ++j) out[j] = (x[j] - mean) * factor * weight[j] + (bias ? bias[j] : 0.0f);
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

// x times a logistic function of z: silu of x where z is x.
inline Vec times_logistic(Vec x, Vec z) { return div(x, add(set1(1.0f), exp(sub(set1(0.0f), z)))); }

inline Vec silu(Vec x) { return times_logistic(x, x); }

// The tanh form: z is 2 sqrt(2 / pi) (x + 0.044715 x^3).
inline Vec gelu(Vec x) {
  return times_logistic(x, mul(set1(1.5957691216057308f), fma(mul(mul(x, x), x), set1(0.044715f), x)));
}

inline Vec swiglu_oai(Vec gate, Vec up) {  // bounds come first in min and max, which then let NaN through
  const Vec g = min(set1(7.0f), gate), u = max(set1(-7.0f), min(set1(7.0f), up));
  return mul(times_logistic(g, mul(set1(1.702f), g)), add(u, set1(1.0f)));
}

inline Vec relu_sqr(Vec x) {  // zero comes first in max, which then lets NaN through
  const Vec kept = max(set1(0.0f), x);
  return mul(kept, kept);
}

template <Activation Kind>
inline Vec activated(Vec x, Vec up) {
  if constexpr (Kind == Activation::kSiluGated) return mul(silu(x), up);
  if constexpr (Kind == Activation::kGeluGated) return mul(gelu(x), up);
  if constexpr (Kind == Activation::kSwigluOai) return swiglu_oai(x, up);
  if constexpr (Kind == Activation::kGelu) return gelu(x);
  if constexpr (Kind == Activation::kReluSqr) return relu_sqr(x);
}

template <Activation Kind>
void activate_all(const float* x, int n, float* out) {
  const float* const up = is_gated(Kind) ? x + n : x;
  int i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, activated<Kind>(load(x + i), load(up + i)));
  if (i < n)
    store_partial(out + i, activated<Kind>(load_partial(x + i, n - i, 0.0f), load_partial(up + i, n - i, 0.0f)), n - i);
}

void activate(const float* x, Activation activation, int n, float* out) {
  switch (activation) {
    case Activation::kSiluGated: return activate_all<Activation::kSiluGated>(x, n, out);
    case Activation::kGeluGated: return activate_all<Activation::kGeluGated>(x, n, out);
    case Activation::kSwigluOai: return activate_all<Activation::kSwigluOai>(x, n, out);
    case Activation::kGelu: return activate_all<Activation::kGelu>(x, n, out);
    case Activation::kReluSqr: return activate_all<Activation::kReluSqr>(x, n, out);
  }
}

void add_to(float* x, const float* y, float scale, int n) {
  for (int i = 0; i < n; ++i) x[i] += scale * y[i];
}

inline Vec soft_capped(Vec x, float cap) {  // cap * tanh(x / cap)
  const Vec e = exp(mul(x, set1(2.0f / cap)));
  return mul(set1(cap), sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f)))));
}

void scale_by(float* x, float factor, float soft_cap, int n) {
  for (int i = 0; i < n; ++i) x[i] *= factor;
  if (soft_cap == 0.0f) return;
  int i = 0;
  for (; i + 16 <= n; i += 16) store(x + i, soft_capped(load(x + i), soft_cap));
  if (i < n) store_partial(x + i, soft_capped(load_partial(x + i, n - i, 0.0f), soft_cap), n - i);
}
