// Every entry of every kernel table this machine can run against the scalar one, bit for bit. Prints a checksum of what
// the scalar table gave, which must be the same on every architecture: so all inputs come from integer arithmetic.
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cpu/cpu_features.h"
#include "cpu/repack.h"

namespace {

using namespace rvllm;

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

int failures = 0;
int cases = 0;
uint64_t checksum = 0xcbf29ce484222325;  // FNV-1a

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

std::vector<float> normals(int64_t count, uint64_t seed, float factor = 1.0f) {
  Random random(seed);
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(random.normal() * factor);
  return values;
}

// Values that overflow, vanish, tie, or are no numbers, among normal ones.
std::vector<float> hostile(int64_t count, uint64_t seed) {
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
std::vector<float> activations(int rows, int k, uint64_t seed) {
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

  Quantized(int64_t rows, int64_t k)
      : q(output<int8_t>(rows * k)), scale(output(rows * k / 32)), scaled_sum(output(rows * k / 32)),
        sum(output<int32_t>(rows * k / 32)), half_sum(output<int32_t>(rows * k / 16)) {}
  QuantizedRows view() { return {q.data(), scale.data(), scaled_sum.data(), sum.data(), half_sum.data()}; }
};

void test_quantize_rows() {
  constexpr int kRows = 24;
  for (int k : {32, 64, 288})
    for (int kind = 0; kind < 2; ++kind) {
      const int stride = k + 5;
      const auto x = kind ? hostile(kRows * stride, 1) : activations(kRows, stride, 2);
      compare(named("quantize_rows k, kind", k, kind), [&](const Kernels& table) {
        Quantized out(kRows, k);
        table.quantize_rows(x.data(), stride, k, out.view(), 0, 7);
        table.quantize_rows(x.data(), stride, k, out.view(), 7, kRows);
        Bits bits;
        bits.add(out.q);
        bits.add(out.scale);
        bits.add(out.scaled_sum);
        bits.add(out.sum);
        bits.add(out.half_sum);
        return bits;
      });
    }
}

struct WeightType {
  GgmlType type;
  int halves[2];  // where a block has its f16 scales; -1: none
};

constexpr WeightType kWeightTypes[] = {
    {GgmlType::F32, {-1, -1}}, {GgmlType::F16, {0, -1}},    {GgmlType::BF16, {-1, -1}}, {GgmlType::Q4_0, {0, -1}},
    {GgmlType::Q4_1, {0, 2}},  {GgmlType::Q5_0, {0, -1}},   {GgmlType::Q5_1, {0, 2}},   {GgmlType::Q8_0, {0, -1}},
    {GgmlType::Q2_K, {80, 82}}, {GgmlType::Q3_K, {108, -1}}, {GgmlType::Q4_K, {0, 2}},   {GgmlType::Q5_K, {0, 2}},
    {GgmlType::Q6_K, {208, -1}},  {GgmlType::TQ1_0, {52, -1}},  {GgmlType::TQ2_0, {64, -1}}, {GgmlType::IQ1_S, {0, -1}},
    {GgmlType::IQ1_M, {-1, -1}},  {GgmlType::IQ2_XXS, {0, -1}}, {GgmlType::IQ2_XS, {0, -1}}, {GgmlType::IQ2_S, {0, -1}},
    {GgmlType::IQ3_XXS, {0, -1}}, {GgmlType::IQ3_S, {0, -1}},   {GgmlType::IQ4_NL, {0, -1}}, {GgmlType::IQ4_XS, {0, -1}},
    {GgmlType::MXFP4, {-1, -1}},
};

// Rows of n * k weights as a file has them: the first have all bits of their codes set, none, or the sign alone.
std::vector<uint8_t> file_rows(const WeightType& w, const TypeInfo& info, int n, int k, uint64_t seed) {
  Random random(seed);
  const int row_blocks = k / info.block_size;
  std::vector<uint8_t> bytes(size_t(n) * size_t(row_blocks) * size_t(info.block_bytes));
  uint8_t* block = bytes.data();
  for (int row = 0; row < n; ++row)
    for (int b = 0; b < row_blocks; ++b, block += info.block_bytes) {
      const int codes[] = {0xff, 0, 0x80};
      for (int i = 0; i < info.block_bytes; ++i) block[i] = uint8_t(row < 3 ? codes[row] : random.below(256));
      for (int at : w.halves) {
        const uint16_t extremes[] = {0x7bff, 0xfbff, 0x0001, 0x8000};
        const uint16_t half = random.below(8) ? random.finite_half() : extremes[random.below(4)];
        if (at >= 0) std::memcpy(block + at, &half, 2);
      }
      const float f = random.normal();
      uint8_t word[4];
      std::memcpy(word, &f, 4);
      if (w.type == GgmlType::F32) std::memcpy(block, word, 4);
      if (w.type == GgmlType::BF16) std::memcpy(block, word + 2, 2);  // both architectures are little-endian
    }
  return bytes;
}

std::vector<uint8_t> packed(const TypeInfo& info, const std::vector<uint8_t>& rows, int n, int k) {
  const int64_t tile_bytes = packed_tile_bytes(packed_type(info), k);
  const int tiles = (n + kTileCols - 1) / kTileCols;
  std::vector<uint8_t> out(size_t(tiles * tile_bytes));
  for (int t = 0; t < tiles; ++t) repack_tile(info, rows.data(), n, k, t, out.data() + t * tile_bytes);
  return out;
}

void test_linear() {
  for (const WeightType& w : kWeightTypes) {
    const TypeInfo& info = *find_type(uint32_t(w.type));
    const PackedType type = packed_type(info);
    const int ks[3][3] = {{1, 33, 200}, {32, 288, 544}, {256, 512, 768}};
    for (int k : ks[info.block_size == 1 ? 0 : info.block_size == kBlock ? 1 : 2])
      for (int n : {1, 16, 35}) {
        const auto weight = packed(info, file_rows(w, info, n, k, uint64_t(n + k)), n, k);
        compare(std::string("unpack_row ") + info.name + named(" k, n", k, n), [&](const Kernels& table) {
          Bits bits;
          for (int column = 0; column < kTileCols; ++column) {
            auto out = output(k);
            table.unpack_row[int(type)]({weight.data(), column, k, info.codebook}, out.data());
            bits.add(out);
          }
          return bits;
        });
        const auto x = activations(65, k, 3);
        const auto bias = normals(n, 4);
        Quantized quantized(65, k);
        if (info.decode) kernels_scalar().quantize_rows(x.data(), k, k, quantized.view(), 0, 65);
        for (int rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 21, 38, 65})
          compare(std::string("linear ") + info.name + named(" k, n, rows", k, n, rows), [&](const Kernels& table) {
            auto out = output(rows * (n + 3));
            LinearArgs args{};
            args.weight = weight.data();
            args.tile_bytes = packed_tile_bytes(type, k);
            args.codebook = info.codebook;
            args.k = k;
            args.n = n;
            args.rows = rows;
            args.x = x.data();
            args.x_stride = k;
            args.xq = quantized.view();
            args.bias = rows % 2 ? bias.data() : nullptr;
            args.out = out.data();
            args.out_stride = n + 3;
            const auto linear = table.linear[int(type)];
            linear(args, 0, 1);
            linear(args, 1, (n + kTileCols - 1) / kTileCols);
            Bits bits;
            bits.add(out);
            return bits;
          });
      }
  }
}

// Every f16, as a weight times 1.
void test_halves() {
  const TypeInfo& info = *find_type(uint32_t(GgmlType::F16));
  constexpr int kHalves = 65536;
  std::vector<uint8_t> rows(2 * kHalves);
  for (int i = 0; i < kHalves; ++i) {
    const uint16_t half = uint16_t(i);
    std::memcpy(rows.data() + 2 * i, &half, 2);
  }
  const auto weight = packed(info, rows, kHalves, 1);
  const float one = 1.0f;
  compare("linear F16, every value", [&](const Kernels& table) {
    auto out = output(kHalves);
    LinearArgs args{};
    args.weight = weight.data();
    args.tile_bytes = packed_tile_bytes(PackedType::F16, 1);
    args.k = args.rows = 1;
    args.n = kHalves;
    args.x = &one;
    args.x_stride = 1;
    args.out = out.data();
    table.linear[int(PackedType::F16)](args, 0, kHalves / kTileCols);
    Bits bits;
    bits.add(out);
    return bits;
  });
}

void test_dot_products() {
  constexpr int kIn = 32 * kMaxChunk;
  Random random(8);
  alignas(64) static uint8_t codes[kMaxChunk * kTileCodes];
  static int8_t x[kRowBlock * kIn];
  for (uint8_t& code : codes) code = uint8_t(random.below(16));
  for (int8_t& value : x) value = int8_t(random.below(255) - 127);
  compare("dot_products", [&](const Kernels& table) {
    std::vector<float> out(kRowBlock * kTileCols);
    table.dot_products(codes, x, out.data());
    Bits bits;
    bits.add(out);
    return bits;
  });
}

void test_elementwise() {
  for (int n : {1, 2, 15, 16, 17, 31, 100, 576, 50021})
    for (int kind = 0; kind < 2; ++kind) {
      const auto x = kind ? hostile(n + kGuard, 5) : normals(n + kGuard, 6, 4.0f);
      const auto y = kind ? hostile(n, 7) : normals(n, 8);
      const auto one = [&](const char* name, const auto& run) {
        compare(named(name, n, kind), [&](const Kernels& table) {
          auto out = x;
          run(table, out.data());
          Bits bits;
          bits.add(out);
          return bits;
        });
      };
      one("rms_norm n, kind", [&](const Kernels& t, float* out) { t.rms_norm(out, y.data(), 1e-5f, n, out); });
      for (const float* bias : {(const float*)nullptr, y.data()})
        one("layer_norm n, kind", [&](const Kernels& t, float* out) { t.layer_norm(out, y.data(), bias, 1e-5f, n, out); });
      auto gate_up = x;
      gate_up.resize(size_t(n));
      gate_up.insert(gate_up.end(), y.begin(), y.end());
      for (int activation = 0; activation < kNumActivations; ++activation)
        one(kActivationNames[activation], [&](const Kernels& t, float* out) {
          t.activate(gate_up.data(), Activation(activation), n, out);
        });
      for (float factor : {1.0f, 0.22f})
        one("add n, kind", [&](const Kernels& t, float* out) { t.add(out, y.data(), factor, n); });
      one("sigmoid n, kind", [&](const Kernels& t, float* out) {
        for (int i = 0; i < n; ++i) out[i] = t.sigmoid(out[i]);
      });
      for (float soft_cap : {0.0f, 30.0f})
        one("scale n, kind", [&](const Kernels& t, float* out) { t.scale(out, 33.3f, soft_cap, n); });
    }
}

void test_route() {
  for (int num_experts : {1, 8, 17, 32, 60, 128})
    for (int num_used : {1, 2, 4, 8})
      for (int kind = 0; num_used <= num_experts && kind < 3; ++kind) {
        auto logits = kind == 2 ? hostile(num_experts, 16) : normals(num_experts, 17, 8.0f);
        if (kind == 1)
          for (float& logit : logits) logit = float(int(logit));  // many are equal
        for (int normalized = 0; normalized < 2; ++normalized)
          compare(named("route E, k, kind, normalized", num_experts, num_used, kind, normalized),
                  [&](const Kernels& table) {
                    auto experts = output<int32_t>(num_used);
                    auto weights = output(num_used);
                    table.route(logits.data(), num_experts, num_used, normalized, experts.data(), weights.data());
                    Bits bits;
                    bits.add(experts);
                    bits.add(weights);
                    return bits;
                  });
      }
}

void test_rope() {
  constexpr int kHeads = 3;
  for (int head_dim : {2, 10, 64, 80, 256})
    for (int dim : {2, head_dim / 4 * 2, head_dim})
      for (int interleaved = 0; dim && interleaved < 2; ++interleaved) {
        const auto x = activations(1, kHeads * head_dim + kGuard, 9);
        const auto cos_sin = normals(dim, 10);
        compare(named("rope head_dim, dim, interleaved", head_dim, dim, interleaved), [&](const Kernels& table) {
          auto out = x;
          table.rope(out.data(), kHeads, head_dim, dim, interleaved, cos_sin.data());
          Bits bits;
          bits.add(out);
          return bits;
        });
      }
}

void test_store_kv() {
  for (int type = 0; type < kNumKVTypes; ++type)
    for (int head_dim : {1, 16, 20, 64, 80, 256, 8192})
      for (int block_size : {1, 8, 16, 24}) {
        const auto k = hostile(head_dim, 11), v = hostile(head_dim, 12);
        compare(named("store_kv type, head_dim, block_size", type, head_dim, block_size), [&](const Kernels& table) {
          auto block = output<uint8_t>(2 * kv_matrix_bytes(KVType(type), head_dim, block_size));
          table.store_kv[type](k.data(), v.data(), head_dim, block_size, block_size - 1, block.data());
          if (block_size > 2) table.store_kv[type](v.data(), k.data(), head_dim, block_size, 2, block.data());
          Bits bits;
          bits.add(block);
          return bits;
        });
      }
}

struct Part {
  std::vector<float> largest, total, values;

  Part(int rows, int head_dim)
      : largest(output(rows)), total(output(rows)), values(output(int64_t(rows) * padded_head_dim(head_dim))) {}
  AttentionPart view() { return {largest.data(), total.data(), values.data()}; }
  void add_to(Bits& bits) const {
    bits.add(largest);
    bits.add(total);
    bits.add(values);
  }
};

// exp of every difference of the largest scores, its cut-off at -87 too; a total of 0 says that there is nothing to add.
void test_merge() {
  const float scores[] = {0.0f, -87.0f, -87.00001f, -86.5f, 3.0f, 90.0f, 1e-20f, -1e30f};
  constexpr int kScores = 8;
  for (int head_dim : {1, 16, 40})
    for (int shift = 0; shift < kScores; ++shift)
      compare(named("merge_partition head_dim, shift", head_dim, shift), [&](const Kernels& table) {
        Part part(kMaxQueryRows, head_dim), sum(kMaxQueryRows, head_dim);
        for (int r = 0; r < kMaxQueryRows; ++r) {
          part.largest[size_t(r)] = scores[r % kScores];
          sum.largest[size_t(r)] = scores[(r + shift) % kScores];
          part.total[size_t(r)] = r / kScores == 1 ? 0.0f : float(r + 1);
          sum.total[size_t(r)] = r / kScores == 2 ? 0.0f : float(r + 2);
        }
        const int count = kMaxQueryRows * padded_head_dim(head_dim);
        part.values = hostile(count, 14);
        sum.values = normals(count + kGuard, 15);
        table.merge_partition(kMaxQueryRows, head_dim, part.view(), sum.view());
        Bits bits;
        sum.add_to(bits);
        return bits;
      });
}

// Row r sees `window` positions up to context - 1 - r % 7; queries grow with r, so that softmax turns sharp.
void test_attention_case(KVType type, int head_dim, int block_size, int context, int window, int rows, float soft_cap) {
  const int blocks = (context + block_size - 1) / block_size;
  const int64_t block_stride = 2 * kv_matrix_bytes(type, head_dim, block_size) + 8;
  Random random(uint64_t(head_dim * block_size + context));
  std::vector<int32_t> block_table;
  for (int b = 0; b < blocks; ++b) block_table.push_back(b + 1);
  for (int b = blocks - 1; b > 0; --b) std::swap(block_table[size_t(b)], block_table[size_t(random.below(b + 1))]);
  // Positions past the context are never written: whatever lies there must not matter.
  std::vector<uint8_t> cache(size_t(block_stride * (blocks + 1)), 0x7e);
  const auto keys = normals(context * head_dim, 16), values = normals(context * head_dim, 17);
  for (int p = 0; p < context; ++p)
    kernels_scalar().store_kv[int(type)](keys.data() + p * head_dim, values.data() + p * head_dim, head_dim, block_size,
                                         p % block_size, cache.data() + block_table[size_t(p / block_size)] * block_stride);
  const auto q = normals(rows * head_dim, 13, 2.0f);

  AttentionArgs args{};
  args.rows = rows;
  args.head_dim = head_dim;
  args.block_size = block_size;
  args.block_table = block_table.data();
  args.cache = cache.data();
  args.block_stride = block_stride;
  args.scale = 0.25f;
  args.soft_cap = soft_cap;
  for (int r = 0; r < rows; ++r) {
    args.q[r] = q.data() + r * head_dim;
    args.last[r] = context - r % 7 > 1 ? context - r % 7 : 1;
    args.first[r] = window && args.last[r] > window ? args.last[r] - window : 0;
  }
  int first = args.first[0], last = args.last[0];
  for (int r = 1; r < rows; ++r) {
    first = args.first[r] < first ? args.first[r] : first;
    last = args.last[r] > last ? args.last[r] : last;
  }
  compare(named("attention type, head_dim, block_size, context, window, rows", int(type), head_dim, block_size, context,
                window, rows),
          [&](const Kernels& table) {
            Part part(rows, head_dim), sum(rows, head_dim);
            for (int r = 0; r < rows; ++r) sum.total[size_t(r)] = 0.0f;
            Bits bits;
            for (int begin = first / kPartition * kPartition; begin < last; begin += kPartition) {
              table.attend_partition[int(type)](args, begin, part.view());
              part.add_to(bits);
              table.merge_partition(rows, head_dim, part.view(), sum.view());
              sum.add_to(bits);
            }
            return bits;
          });
}

void test_attention() {
  for (int type = 0; type < kNumKVTypes; ++type) {
    const KVType kv = KVType(type);
    for (int head_dim : {8, 20, 64, 80, 256})
      for (int block_size : {8, 16, 24, 32})
        for (int context : {1, 17, 255, 600})
          for (int window : {0, 5, 300})
            for (int rows : {1, 7})
              if (kv == KVType::kF16 || (rows == 7 && window != 5))
                test_attention_case(kv, head_dim, block_size, context, window, rows, 0.0f);
    for (int rows : {2, 3, 4, 8, kMaxQueryRows})
      for (float soft_cap : {0.0f, 50.0f}) test_attention_case(kv, 64, 16, 300, 0, rows, soft_cap);
  }
}

}  // namespace

int main() {
  test_quantize_rows();
  test_linear();
  test_dot_products();
  test_halves();
  test_elementwise();
  test_route();
  test_rope();
  test_store_kv();
  test_merge();
  test_attention();
  std::string names;
  for (const Kernels* table : available_kernels()) names += std::string(" ") + table->name;
  if (failures) {
    std::printf("kernels%s: %d differences from scalar in %d cases\n", names.c_str(), failures, cases);
    return 1;
  }
  std::printf("kernels%s: the same bits in %d cases, checksum %016llx\n", names.c_str(), cases,
              (unsigned long long)checksum);
}
