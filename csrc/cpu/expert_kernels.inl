// The choice of experts. Included inside an anonymous namespace, after float_kernels.inl.

void route(const float* logits, int num_experts, int num_used, bool normalized, int32_t* experts, float* weights) {
  int found = 0;
  for (int e = 0; e < num_experts; ++e) {
    int at = found;
    // Of equal logits the lower index stays ahead; a NaN goes first, so that it is not lost.
    for (; at > 0; --at) {
      const float ahead = logits[experts[at - 1]];
      if (logits[e] <= ahead || ahead != ahead) break;
    }
    if (at == num_used) continue;
    if (found < num_used) ++found;
    for (int i = found - 1; i > at; --i) experts[i] = experts[i - 1];
    experts[at] = e;
  }
  const float largest = logits[experts[0]];
  float total = 0.0f;
  for (int i = 0; i < num_used; ++i) {
    weights[i] = exp(logits[experts[i]] - largest);
    total += weights[i];
  }
  if (!normalized) {
    Vec sum = set1(0.0f);
    int e = 0;
    for (; e + 16 <= num_experts; e += 16) sum = add(sum, exp(sub(load(logits + e), set1(largest))));
    if (e < num_experts)
      sum = add(sum, exp(sub(load_partial(logits + e, num_experts - e, -__builtin_inff()), set1(largest))));
    total = reduce_add(sum);
  }
  for (int i = 0; i < num_used; ++i) weights[i] /= total;
}

float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }
