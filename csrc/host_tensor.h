// Reading tensors of the model file, the same for every backend.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "check.h"
#include "quant.h"
#include "tensor.h"
#include "thread_pool.h"

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

inline void check_finite(bool finite, const HostTensor& t) {
  check(finite, t.name, ": holds NaN or infinity, so no answer would be right: the file is damaged");
}

// All values of a small tensor, which is then consumed.
inline std::vector<float> to_floats(const HostTensor& t, const char* backend) {
  std::vector<float> values(size_t(t.rows * t.cols));
  const TypeInfo& type = checked_type(t, backend);
  check_finite(all_finite(type, t.data, t.rows * t.cols), t);
  dequantize_row(type, t.data, values.data(), t.rows * t.cols);
  if (t.consumed) t.consumed(t.bytes);
  return values;
}

// Rows that each expert has of a tensor [experts * N, K]. Throws invalid_argument naming the tensor.
inline int64_t rows_of_expert(const HostTensor& t, int num_experts) {
  check(t.rows % num_experts == 0, t.name, ": ", t.rows, " rows are not the same number for each of ", num_experts,
        " experts");
  return t.rows / num_experts;
}

// Goes through the tiles of `tile_rows` rows of all experts, `piece` of them at a time, so that a large tensor is not
// in memory twice: pack(rows of the tile's expert in the file, tile of the expert, tile of all) runs on threads, then
// finish(first tile, number of tiles) once a piece. Throws invalid_argument naming a tensor with NaN or infinity.
template <class Pack, class Finish>
void for_tiles(ThreadPool& pool, const HostTensor& t, int num_experts, int tile_rows, int64_t piece, const Pack& pack,
               const Finish& finish) {
  const int64_t rows = rows_of_expert(t, num_experts), row_bytes = int64_t(t.bytes) / t.rows;
  const int64_t tiles = (rows + tile_rows - 1) / tile_rows, all = tiles * num_experts;
  const TypeInfo& type = *find_type(t.type);
  std::atomic<bool> finite{true};
  const auto work = [&](int64_t i) {
    const uint8_t* expert = t.data + i / tiles * rows * row_bytes;
    const int64_t row = i % tiles * tile_rows, count = std::min<int64_t>(tile_rows, rows - row);
    if (!all_finite(type, expert + row * row_bytes, count * t.cols)) finite = false;
    pack(expert, i % tiles, i);
  };
  for (int64_t first = 0; first < all; first += piece) {
    const int64_t count = std::min(piece, all - first);
    pool.parallel_for(count, 4, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = first + begin; i < first + end; ++i) work(i);
    });
    check_finite(finite, t);
    finish(first, count);
    const int64_t done = first + count;
    if (t.consumed) t.consumed(size_t((done / tiles * rows + std::min(rows, done % tiles * tile_rows)) * row_bytes));
  }
}

// Goes through a tensor that is taken as it lies in the file: copy(first byte, number of bytes) once a piece of `piece`
// bytes, or of a row that is longer. Throws as for_tiles does.
template <class Copy>
void for_pieces(ThreadPool& pool, const HostTensor& t, int64_t piece, const Copy& copy) {
  const int64_t row_bytes = int64_t(t.bytes) / t.rows;
  const auto look = [](const uint8_t*, int64_t, int64_t) {};
  for_tiles(pool, t, 1, 1, std::max<int64_t>(1, piece / row_bytes), look,
            [&](int64_t first, int64_t count) { copy(first * row_bytes, count * row_bytes); });
}

// All values of small tensors, one tensor after the other.
inline std::vector<float> to_floats(const std::vector<HostTensor>& tensors, const char* backend) {
  std::vector<float> all;
  for (const HostTensor& t : tensors) {
    const std::vector<float> values = to_floats(t, backend);
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

}  // namespace rvllm
