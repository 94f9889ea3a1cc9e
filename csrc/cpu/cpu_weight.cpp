#include "cpu/cpu_weight.h"

#include <algorithm>

#include "check.h"
#include "cpu/cpu_backend.h"
#include "cpu/repack.h"
#include "host_tensor.h"

namespace rvllm {
namespace {

constexpr int64_t kPieceBytes = 8 << 20;  // of weights repacked at a time

}  // namespace

std::unique_ptr<Weight> CpuBackend::load_weight(const std::vector<HostTensor>& parts,
                                                const std::vector<HostTensor>& biases) {
  return load_experts(1, parts, biases);
}

std::unique_ptr<Weight> CpuBackend::load_experts(int num_experts, const std::vector<HostTensor>& tensors,
                                                 const std::vector<HostTensor>& biases) {
  auto weight = std::make_unique<CpuWeight>();
  weight->num_experts = num_experts;
  weight->cols = tensors.front().cols;
  for (const HostTensor& t : tensors) {
    const TypeInfo& type = checked_type(t, "CPU");
    check(t.rows % num_experts == 0, t.name, ": ", t.rows, " rows are not divided by ", num_experts, " experts");
    const int64_t row_bytes = int64_t(t.bytes) / t.rows;
    CpuWeight::Part part;
    part.type = packed_type(type);
    part.codebook = type.codebook;
    part.rows = t.rows / num_experts;
    part.first_row = weight->rows;
    part.tile_bytes = packed_tile_bytes(part.type, t.cols);
    const int64_t tiles = int64_t(num_experts) * part.tiles();
    part.data = arena_.take(size_t(tiles * part.tile_bytes));
    // Piece by piece, so that a large tensor is not in memory twice.
    const int64_t piece = std::max<int64_t>(4 * pool_.size(), kPieceBytes / part.tile_bytes);
    for (int64_t first = 0; first < tiles; first += piece) {
      const int64_t count = std::min(piece, tiles - first);
      pool_.parallel_for(count, 4, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = first + begin; i < first + end; ++i)
          repack_tile(type, t.data + i / part.tiles() * part.rows * row_bytes, part.rows, t.cols, i % part.tiles(),
                      part.data + i * part.tile_bytes);
      });
      const int64_t done = first + count;
      const int64_t rows = done / part.tiles() * part.rows + std::min(part.rows, done % part.tiles() * kTileCols);
      if (t.consumed) t.consumed(size_t(rows * row_bytes));
    }
    weight->rows += part.rows;
    weight->bytes += tiles * part.tile_bytes;
    weight->has_quantized |= type.decode != nullptr;
    weight->parts.push_back(part);
  }
  if (!biases.empty()) weight->bias.resize(size_t(num_experts * weight->rows));
  for (size_t i = 0; i < biases.size(); ++i) {
    const CpuWeight::Part& part = weight->parts[i];
    const std::vector<float> values = to_floats(biases[i], "CPU");
    for (int e = 0; e < num_experts; ++e)
      std::copy_n(values.data() + e * part.rows, part.rows, weight->bias.data() + e * weight->rows + part.first_row);
  }
  return weight;
}

std::unique_ptr<Weight> CpuBackend::load_vector(const HostTensor& tensor) {
  auto weight = std::make_unique<CpuVector>();
  weight->rows = tensor.rows;
  weight->cols = tensor.cols;
  weight->values = to_floats(tensor, "CPU");
  return weight;
}

}  // namespace rvllm
