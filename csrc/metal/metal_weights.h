// Parameters in memory that host and device share.
#pragma once

#include <memory>
#include <vector>

#include "backend.h"
#include "metal/kernel_args.h"
#include "metal/metal_device.h"
#include "quant.h"

namespace rvllm {

// Of the formats of cuda/packed_weights.h, as the kernels' names end.
constexpr const char* kFormatNames[] = {"q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k",   "q3_k", "q4_k",
                                        "q5_k", "q6_k", "tq",   "iq",   "iq16", "iq4_nl", "mxfp4"};

// A matrix, or some rows of a stack of them.
struct MetalMatrix {
  MatrixArgs args = {};
  int format = -1;  // -1: float weights of `type`
  GgmlType type = GgmlType::F32;
  int64_t first_row = 0;
  const uint8_t* data = nullptr;

  std::string kernel(const char* prefix) const;  // "embedding_" + what the weights are
};

class MetalWeight final : public Weight {
 public:
  std::vector<MetalMatrix> parts;
  std::shared_ptr<void> memory, bias_memory;

  const float* bias() const { return static_cast<const float*>(bias_memory.get()); }
};

class MetalVector final : public Weight {
 public:
  std::shared_ptr<void> memory;
  const float* values() const { return static_cast<const float*>(memory.get()); }
};

// Packs matrices [experts * N_i, K]. Throws invalid_argument naming a tensor that has no kernel here.
std::unique_ptr<MetalWeight> load_metal_weight(MetalDevice& device, ThreadPool& pool, int num_experts,
                                               const std::vector<HostTensor>& tensors,
                                               const std::vector<HostTensor>& biases);
std::unique_ptr<MetalVector> load_metal_vector(MetalDevice& device, const HostTensor& tensor);

}  // namespace rvllm
