// What the tests of kernels have in common: inputs, and a comparison of every table with the scalar one, bit for bit.
#pragma once

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/cpu_features.h"

namespace rvllm {

// SplitMix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint32_t bits() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return uint32_t((z ^ z >> 31) >> 32);
  }
  int below(int n) { return int(bits() % uint32_t(n)); }
  // Bell-shaped, variance 1/3: the sum of four uniform values, exact in float32.
  float normal() {
    int sum = 0;
    for (int i = 0; i < 4; ++i) sum += int(bits() >> 16);
    return float(sum - 2 * 65535) * 0x1p-16f;
  }
  // No signaling NaN: compilers may take it for a quiet one or not, and arithmetic never gives one.
  float any_float() {
    uint32_t word = bits();
    if ((word & 0x7fffffff) > 0x7f800000) word |= 0x400000;
    float f;
    std::memcpy(&f, &word, 4);
    return f;
  }
  uint16_t finite_half() {
    const uint32_t word = bits();
    return uint16_t((word & 0x7c00) == 0x7c00 ? word & 0x83ff : word);
  }

 private:
  uint64_t state_;
};

// What a kernel wrote. Every NaN counts as the same: which one an operation gives depends on the processor.
class Bits {
 public:
  std::vector<uint32_t> words;

  void add(const std::vector<float>& values) {
    for (float f : values) {
      uint32_t word = 0x7fc00000;
      if (f == f) std::memcpy(&word, &f, 4);
      words.push_back(word);
    }
  }
  template <class T>
  void add(const std::vector<T>& values) {
    for (T v : values) words.push_back(uint32_t(v));
  }
};

inline int failures = 0;
inline int cases = 0;
inline uint64_t checksum = 0xcbf29ce484222325;  // FNV-1a

// Runs one case, a function of a table, on every table.
template <class Run>
void compare(const std::string& name, const Run& run) {
  const Bits expected = run(kernels_scalar());
  ++cases;
  for (uint32_t word : expected.words) checksum = (checksum ^ word) * 0x100000001b3;
  for (const Kernels* table : available_kernels()) {
    if (table == &kernels_scalar()) continue;
    const Bits got = run(*table);
    size_t i = 0;
    while (i < expected.words.size() && got.words[i] == expected.words[i]) ++i;
    if (i == expected.words.size()) continue;
    std::printf("%s: %s: word %zu of %zu is %08x, not %08x\n", table->name, name.c_str(), i, expected.words.size(),
                unsigned(got.words[i]), unsigned(expected.words[i]));
    ++failures;
  }
}

template <class... Parts>
std::string named(const char* what, const Parts&... parts) {
  std::string name = what;
  ((name += ' ', name += std::to_string(parts)), ...);
  return name;
}

// Nothing may be written past an output: every one ends in a guard that is compared too.
constexpr int kGuard = 16;
template <class T = float>
std::vector<T> output(int64_t count) { return std::vector<T>(size_t(count + kGuard), T(77)); }

inline std::vector<float> normals(int64_t count, uint64_t seed, float factor = 1.0f) {
  Random random(seed);
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(random.normal() * factor);
  return values;
}

// Values that overflow, vanish, tie, or are no numbers, among normal ones.
inline std::vector<float> hostile(int64_t count, uint64_t seed) {
  constexpr float kInf = __builtin_inff();
  const float list[] = {0.0f, -0.0f, 1e-45f, -1e-40f, 1e-30f, 65504.0f, 65519.9f, 65520.0f, -1e6f, 3.4e38f,
                        -3.4e38f, kInf, -kInf, __builtin_nanf(""), 87.0f, -87.0f, 88.0f, -88.5f, 6e-8f, -3e-8f,
                        2.5f, -0.5f, 20.0f, -20.0f};
  Random random(seed);
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i)
    switch (random.below(3)) {
      case 0: values.push_back(list[random.below(sizeof(list) / sizeof(*list))]); break;
      case 1: values.push_back(random.any_float()); break;
      default: values.push_back(random.normal() * 8.0f);
    }
  return values;
}

// [rows, k]: every second row is made to find overflows and lost lanes.
inline std::vector<float> activations(int rows, int k, uint64_t seed) {
  std::vector<float> x = normals(int64_t(rows) * k, seed);
  for (int r = 1; r < rows; r += 2)
    for (int i = 0; i < k; ++i) {
      float& v = x[size_t(r) * size_t(k) + size_t(i)];
      switch (r / 2 % 9) {
        case 0: v = i % 2 ? 1.0f : -1.0f; break;
        case 1: v = 300.0f; break;
        case 2: v = -1.0f; break;
        case 3: v = i == k / 2 ? 1e6f : 0.0f; break;
        case 4: v = 0.0f; break;
        case 5: v *= 1e-20f; break;
        case 6: v *= 1e20f; break;
        case 7: v = i % 32 == 31 ? 1.0f : 1e-3f; break;
        default: v = i % 32 == 31 ? 127.0f : float(i % 32) - 16.5f;  // scale 1: every code is a tie
      }
    }
  return x;
}

struct Quantized {
  std::vector<int8_t> q;
  std::vector<float> scale, scaled_sum;
  std::vector<int32_t> sum, half_sum;
  int64_t rows;

  Quantized(int64_t rows, int64_t k)
      : q(output<int8_t>(rows * k)), scale(output(rows * k / 32)), scaled_sum(output(rows * k / 32)),
        sum(output<int32_t>(rows * k / 32)), half_sum(output<int32_t>(rows * k / 16)), rows(rows) {}
  QuantizedRows view() { return {q.data(), scale.data(), scaled_sum.data(), sum.data(), half_sum.data(), rows}; }
};

void test_linear_kernels();
void test_attention_kernels();
void test_attention_plan();

}  // namespace rvllm
