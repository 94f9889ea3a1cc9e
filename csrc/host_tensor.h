// Reading tensors of the model file, the same for every backend.
#pragma once

#include <vector>

#include "check.h"
#include "quant.h"
#include "tensor.h"

namespace rvllm {

// The type of a tensor whose size is sound. Throws invalid_argument naming the tensor and what `backend` lacks.
inline const TypeInfo& checked_type(const HostTensor& t, const char* backend) {
  const TypeInfo* type = find_type(t.type);
  check(type != nullptr, t.name, ": ggml type ", t.type, " has no ", backend, " kernel");
  check(t.cols % type->block_size == 0, t.name, ": rows of ", t.cols, " weights are no whole number of ", type->name,
        " blocks of ", type->block_size);
  check(t.bytes == size_t(t.rows * (t.cols / type->block_size) * type->block_bytes), t.name, ": ", t.bytes,
        " bytes for ", t.rows, " x ", t.cols, " weights of type ", type->name);
  return *type;
}

// All values of a small tensor, which is then consumed.
inline std::vector<float> to_floats(const HostTensor& t, const char* backend) {
  std::vector<float> values(size_t(t.rows * t.cols));
  dequantize_row(checked_type(t, backend), t.data, values.data(), t.rows * t.cols);
  if (t.consumed) t.consumed(t.bytes);
  return values;
}

}  // namespace rvllm
