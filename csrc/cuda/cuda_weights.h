// Parameters on the device.
#pragma once

#include <memory>
#include <vector>

#include "backend.h"
#include "cuda/kernels.h"
#include "thread_pool.h"

namespace rvllm::cuda {

class CudaWeight final : public Weight {
 public:
  std::vector<DeviceMatrix> parts;
  std::shared_ptr<void> memory, bias_memory;
  bool has_quantized = false;

  const float* bias() const { return static_cast<const float*>(bias_memory.get()); }
};

class CudaVector final : public Weight {
 public:
  std::shared_ptr<void> memory;
  const float* values() const { return static_cast<const float*>(memory.get()); }
};

// Packs matrices [experts * N_i, K] and copies them to the device. Throws invalid_argument naming a tensor that has no
// kernel here.
std::unique_ptr<CudaWeight> load_cuda_weight(ThreadPool& pool, int num_experts, const std::vector<HostTensor>& parts,
                                             const std::vector<HostTensor>& biases);
std::unique_ptr<CudaVector> load_cuda_vector(const HostTensor& tensor);

}  // namespace rvllm::cuda
