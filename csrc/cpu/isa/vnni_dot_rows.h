// Products of codes and activations by vpdpbusd, over IVec and add_dot. Included inside an anonymous namespace.

template <int Bits, int Groups, int R, class Group>
inline void dot_rows(const Group& group, const int8_t* a, IVec* out) {
  constexpr int kChains = R >= 4 ? 1 : 4 / R;  // independent sums, to hide the latency of vpdpbusd when rows are few
  IVec sum[kChains][R];
#pragma GCC unroll 8
  for (int i = 0; i < kChains; ++i)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum[i][r] = iset1(0);
#pragma GCC unroll 8
  for (int g = 0; g < Groups; ++g) {
    const Bytes w = group(g);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum[g % kChains][r] = add_dot(sum[g % kChains][r], w, a + 32 * r + 4 * g);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    out[r] = sum[0][r];
#pragma GCC unroll 8
    for (int i = 1; i < kChains; ++i) out[r] = iadd(out[r], sum[i][r]);
  }
}
