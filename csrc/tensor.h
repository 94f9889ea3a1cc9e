// Plain views: a matrix in a backend's memory, and a tensor of the model file in host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace rvllm {

// Row-major F32 matrix, [rows, cols], in memory of the backend that made it. Rows may lie further apart than cols.
struct Tensor {
  float* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;  // elements from one row to the next

  Tensor() = default;
  Tensor(float* data, int64_t rows, int64_t cols) : data(data), rows(rows), cols(cols), stride(cols) {}

  float* row(int64_t i) const { return data + i * stride; }

  // `count` rows from row `begin` on.
  Tensor slice(int64_t begin, int64_t count) const {
    Tensor view = *this;
    view.data = row(begin);
    view.rows = count;
    return view;
  }

  // The columns [begin, begin + count) of every row.
  Tensor columns(int64_t begin, int64_t count) const {
    Tensor view = *this;
    view.data += begin;
    view.cols = count;
    return view;
  }
};

// One tensor as it lies in a GGUF file: [rows, cols] = [N, K], K innermost; a vector has rows = 1.
struct HostTensor {
  std::string name;
  uint32_t type = 0;  // ggml type id
  int64_t rows = 0;
  int64_t cols = 0;
  const uint8_t* data = nullptr;
  size_t bytes = 0;
  std::function<void(size_t bytes)> consumed = {};  // tells, if set, that the first so many bytes are no longer needed
};

}  // namespace rvllm
