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
    CpuWeight::Part part;
    part.type = packed_type(type);
    part.codebook = type.codebook;
    part.rows = rows_of_expert(t, num_experts);
    part.first_row = weight->rows;
    part.tile_bytes = packed_tile_bytes(part.type, t.cols);
    const int64_t tiles = int64_t(num_experts) * part.tiles();
    part.data = arena_.take(size_t(tiles * part.tile_bytes));
    const int64_t piece = std::max<int64_t>(4 * pool_.size(), kPieceBytes / part.tile_bytes);
    const auto pack = [&](const uint8_t* rows, int64_t tile, int64_t i) {
      repack_tile(type, rows, part.rows, t.cols, tile, part.data + i * part.tile_bytes);
    };
    for_tiles(pool_, t, num_experts, kTileCols, piece, pack, [](int64_t, int64_t) {});
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
