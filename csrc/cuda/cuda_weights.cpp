#include "cuda/cuda_weights.h"

#include <algorithm>
#include <cstring>

#include "check.h"
#include "cuda/device_buffer.h"
#include "cuda/packed_weights.h"
#include "host_tensor.h"

namespace rvllm::cuda {
namespace {

constexpr int64_t kPieceBytes = 32 << 20;  // of weights packed at a time
constexpr int64_t kAlignment = 256;

std::shared_ptr<void> to_device(const std::vector<float>& values, const char* what) {
  auto memory = device_memory(values.size() * sizeof(float), what);
  copy_to_device(memory.get(), values.data(), values.size() * sizeof(float), what);
  return memory;
}

// Where a tensor goes: rows [first_row, ...) of parts[part], from `offset` on.
struct Place {
  int64_t offset, tiles;  // tiles: of one expert
};

// One tensor to its place, piece by piece, so that a large one is not in memory twice.
void copy(ThreadPool& pool, const HostTensor& t, int num_experts, const DeviceMatrix& matrix, const Place& place,
          uint8_t* data) {
  const TypeInfo& type = *find_type(t.type);
  if (matrix.format < 0)
    return for_pieces(pool, t, kPieceBytes, [&](int64_t begin, int64_t bytes) {
      copy_to_device(data + place.offset + begin, t.data + begin, size_t(bytes), "copying weights");
    });
  const int64_t piece = std::max<int64_t>(1, kPieceBytes / matrix.tile_bytes), tiles = place.tiles * num_experts;
  std::vector<uint8_t> packed(size_t(std::min(piece, tiles) * matrix.tile_bytes));
  const auto pack = [&](const uint8_t* rows, int64_t tile, int64_t i) {
    pack_tile(type, rows, rows_of_expert(t, num_experts), t.cols, tile, packed.data() + i % piece * matrix.tile_bytes);
  };
  for_tiles(pool, t, num_experts, kTileRows, piece, pack, [&](int64_t first, int64_t count) {
    copy_to_device(data + place.offset + first * matrix.tile_bytes, packed.data(), size_t(count * matrix.tile_bytes),
                   "copying weights");
  });
}

DeviceMatrix matrix_of(const HostTensor& t, int num_experts) {
  const TypeInfo& type = checked_type(t, "CUDA");
  DeviceMatrix m;
  m.type = type.type;
  m.cols = t.cols;
  m.rows = rows_of_expert(t, num_experts);
  if (type.decode) {
    m.format = format_number(type);
    m.tile_bytes = packed_tile_bytes(m.format, t.cols);
  }
  if (type.codebook) {
    std::memcpy(&m.codebook, type.codebook->values, 16);
    m.unit = type.format.scales >= Scales::kSuperD ? type.codebook->unit : 1.0f;
  }
  return m;
}

}  // namespace

std::unique_ptr<CudaWeight> load_cuda_weight(ThreadPool& pool, int num_experts, const std::vector<HostTensor>& tensors,
                                             const std::vector<HostTensor>& biases) {
  check(num_experts <= kMaxExperts, tensors.front().name, ": ", num_experts, " experts, CUDA has at most ",
        kMaxExperts);
  auto weight = std::make_unique<CudaWeight>();
  weight->num_experts = num_experts;
  weight->cols = tensors.front().cols;
  std::vector<Place> places;
  std::vector<size_t> part_of;
  int64_t bytes = 0;
  for (const HostTensor& t : tensors) {
    DeviceMatrix m = matrix_of(t, num_experts);
    m.first_row = weight->rows;
    const int64_t tiles = (m.rows + kTileRows - 1) / kTileRows;
    const int64_t size = m.format < 0 ? int64_t(t.bytes) : num_experts * tiles * m.tile_bytes;
    m.expert_bytes = size / num_experts;
    DeviceMatrix* const last = weight->parts.empty() ? nullptr : &weight->parts.back();
    // Matrices of one kind become one, where their rows meet at the end of a tile.
    if (last && num_experts == 1 && last->type == m.type && (m.format < 0 || last->rows % kTileRows == 0)) {
      last->rows += m.rows;
    } else {
      bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
      m.data = reinterpret_cast<const uint8_t*>(bytes);  // an offset, as yet
      weight->parts.push_back(m);
    }
    part_of.push_back(weight->parts.size() - 1);
    places.push_back({bytes, tiles});
    bytes += size;
    weight->rows += t.rows / num_experts;
    weight->has_quantized |= m.format >= 0;
  }
  weight->bytes = bytes;
  weight->memory = device_memory(size_t(bytes), tensors.front().name.c_str());
  uint8_t* const data = static_cast<uint8_t*>(weight->memory.get());
  for (DeviceMatrix& m : weight->parts) m.data = data + reinterpret_cast<intptr_t>(m.data);
  for (size_t i = 0; i < tensors.size(); ++i)
    copy(pool, tensors[i], num_experts, weight->parts[part_of[i]], places[i], data);

  const std::vector<float> bias = to_floats(biases, "CUDA");  // [parts][experts, rows of the part]
  if (!bias.empty()) weight->bias_memory = to_device(bias, "biases");
  return weight;
}

std::unique_ptr<CudaVector> load_cuda_vector(const HostTensor& tensor) {
  auto weight = std::make_unique<CudaVector>();
  weight->rows = tensor.rows;
  weight->cols = tensor.cols;
  weight->memory = to_device(to_floats(tensor, "CUDA"), tensor.name.c_str());
  return weight;
}

}  // namespace rvllm::cuda
