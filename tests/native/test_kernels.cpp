// Every entry of every kernel table this machine can run against the scalar one, bit for bit. Prints a checksum of what
// the scalar table gave, which must be the same on every architecture: so all inputs come from integer arithmetic.
#include "kernel_cases.h"

namespace rvllm {
namespace {

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
        one("layer_norm n, kind", [&](const Kernels& t, float* out) {
          t.layer_norm(out, y.data(), bias, 1e-5f, n, out);
        });
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
        const auto bias = normals(num_experts, 18, 0.1f);
        for (int way = 0; way < 8; ++way)
          compare(named("route E, k, kind, way", num_experts, num_used, kind, way),
                  [&](const Kernels& table) {
                    auto scores = logits;
                    auto experts = output<int32_t>(num_used);
                    auto weights = output(num_used);
                    table.route({scores.data(), way & 4 ? bias.data() : nullptr, num_experts, num_used,
                                 (way & 1) != 0, 0.5f, (way & 2) != 0, 2.5f, experts.data(), weights.data()});
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

}  // namespace
}  // namespace rvllm

int main() {
  using namespace rvllm;
  test_quantize_rows();
  test_linear_kernels();
  test_elementwise();
  test_route();
  test_rope();
  test_attention_kernels();
  test_attention_plan();
  std::string names;
  for (const Kernels* table : available_kernels()) names += std::string(" ") + table->name;
  if (failures) {
    std::printf("kernels%s: %d differences from scalar in %d cases\n", names.c_str(), failures, cases);
    return 1;
  }
  std::printf("kernels%s: the same bits in %d cases, checksum %016llx\n", names.c_str(), cases,
              (unsigned long long)checksum);
}
