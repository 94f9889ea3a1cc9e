// What a feed-forward network does between its matrices.
#pragma once

namespace rvllm {

// Gated forms, which come first, take gate and up, [2 K] to [K]: act(gate) * up (arXiv:2002.05202). The others take [K]
// to [K].
enum class Activation {
  kSiluGated,
  kGeluGated,   // gelu: the tanh form (arXiv:1606.08415)
  kSwigluOai,   // gate * logistic(1.702 gate) * (up + 1), with gate at most 7 and up within +-7
  kGelu,
  kReluSqr,     // max(0, x)^2 (arXiv:2109.08668)
};
constexpr const char* kActivationNames[] = {"silu_gated", "gelu_gated", "swiglu_oai", "gelu", "relu_sqr"};
constexpr int kNumActivations = 5;

constexpr bool is_gated(Activation activation) { return activation < Activation::kGelu; }

}  // namespace rvllm
