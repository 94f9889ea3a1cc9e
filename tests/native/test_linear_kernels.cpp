// Products with packed weights of every type, and the unpacking of their rows.
#include "cpu/repack.h"
#include "kernel_cases.h"

namespace rvllm {
namespace {

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
    {GgmlType::IQ3_XXS, {0, -1}}, {GgmlType::IQ3_S, {0, -1}},   {GgmlType::IQ4_NL, {0, -1}},
    {GgmlType::IQ4_XS, {0, -1}},  {GgmlType::MXFP4, {-1, -1}},
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

}  // namespace

void test_linear_kernels() {
  test_linear();
  test_dot_products();
  test_halves();
}

}  // namespace rvllm
