// The choice of experts. Included inside an anonymous namespace, after float_kernels.inl.

float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

inline float sum_of_exps(const float* x, float largest, int n) {
  Vec sum = set1(0.0f);
  int i = 0;
  for (; i + 16 <= n; i += 16) sum = add(sum, exp(sub(load(x + i), set1(largest))));
  if (i < n) sum = add(sum, exp(sub(load_partial(x + i, n - i, -__builtin_inff()), set1(largest))));
  return reduce_add(sum);
}

inline void softmax(float* x, int n) {
  float largest = x[0];
  for (int i = 1; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
  const float sum = sum_of_exps(x, largest, n);
  for (int i = 0; i < n; ++i) x[i] = exp(x[i] - largest) / sum;
}

void route(const RouteArgs& a) {
  float* const scores = a.logits;
  const auto preference = [&](int e) { return a.bias ? scores[e] + a.bias[e] : scores[e]; };
  const bool has_scores = a.sigmoid || a.bias;  // else logits are in the same order
  if (a.sigmoid)
    for (int e = 0; e < a.num_experts; ++e) scores[e] = sigmoid(scores[e]);
  else if (a.bias)
    softmax(scores, a.num_experts);
  int found = 0;
  for (int e = 0; e < a.num_experts; ++e) {
    int at = found;
    // Of equal ones the lower index stays ahead; a NaN goes first, so that it is not lost.
    for (; at > 0; --at) {
      const float ahead = preference(a.experts[at - 1]);
      if (preference(e) <= ahead || ahead != ahead) break;
    }
    if (at == a.num_used) continue;
    if (found < a.num_used) ++found;
    for (int i = found - 1; i > at; --i) a.experts[i] = a.experts[i - 1];
    a.experts[at] = e;
  }
  const float largest = scores[a.experts[0]];
  float total = 0.0f;
  for (int i = 0; i < a.num_used; ++i) {
    const float score = scores[a.experts[i]];
    a.weights[i] = has_scores ? score : exp(score - largest);
    total += a.weights[i];
  }
  if (total < a.least_total) total = a.least_total;
  if (!a.normalized) total = has_scores ? 1.0f : sum_of_exps(scores, largest, a.num_experts);
  for (int i = 0; i < a.num_used; ++i) a.weights[i] = a.weights[i] / total * a.scale;
}
