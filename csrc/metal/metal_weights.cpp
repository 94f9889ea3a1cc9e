#include "metal/metal_weights.h"

#include <algorithm>
#include <cstring>

#include "check.h"
#include "cuda/packed_weights.h"
#include "host_tensor.h"

namespace rvllm {
namespace {

constexpr int64_t kTilesAtATime = 4096;    // packed before the file's pages are let go
constexpr int64_t kPieceBytes = 32 << 20;  // copied before, where nothing is packed
constexpr int64_t kAlignment = 256;

std::shared_ptr<void> to_device(MetalDevice& device, const std::vector<float>& values, const char* what) {
  auto memory = device.alloc(values.size() * sizeof(float), what);
  std::memcpy(memory.get(), values.data(), values.size() * sizeof(float));
  return memory;
}

MetalMatrix matrix_of(const HostTensor& t, int num_experts) {
  const TypeInfo& type = checked_type(t, "Metal");
  MetalMatrix m;
  m.type = type.type;
  m.args.rows = int(rows_of_expert(t, num_experts));
  m.args.cols = int(t.cols);
  m.args.unit = 1.0f;
  if (!type.decode) return m;
  m.format = format_number(type);
  with_format(m.format, [&](auto format) {
    const TileLayout layout = tile_layout<decltype(format)>(t.cols);
    m.args.high = layout.high;
    m.args.scales = layout.scales;
    m.args.tile_bytes = layout.bytes;
  });
  if (type.codebook) {
    std::memcpy(m.args.codebook, type.codebook->values, 16);
    if (type.format.scales >= Scales::kSuperD) m.args.unit = type.codebook->unit;
  }
  return m;
}

void copy(ThreadPool& pool, const HostTensor& t, int num_experts, const MetalMatrix& matrix, uint8_t* out) {
  const TypeInfo& type = *find_type(t.type);
  if (matrix.format < 0)
    return for_pieces(pool, t, kPieceBytes, [&](int64_t begin, int64_t bytes) {
      std::memcpy(out + begin, t.data + begin, size_t(bytes));
    });
  const auto pack = [&](const uint8_t* rows, int64_t tile, int64_t i) {
    pack_tile(type, rows, matrix.args.rows, t.cols, tile, out + i * matrix.args.tile_bytes);
  };
  for_tiles(pool, t, num_experts, kTileRows, kTilesAtATime, pack, [](int64_t, int64_t) {});
}

}  // namespace

std::string MetalMatrix::kernel(const char* prefix) const {
  const char* const floats = type == GgmlType::F32 ? "f32" : type == GgmlType::F16 ? "f16" : "bf16";
  return std::string(prefix) + "_" + (format >= 0 ? kFormatNames[format] : floats);
}

std::unique_ptr<MetalWeight> load_metal_weight(MetalDevice& device, ThreadPool& pool, int num_experts,
                                               const std::vector<HostTensor>& tensors,
                                               const std::vector<HostTensor>& biases) {
  auto weight = std::make_unique<MetalWeight>();
  weight->num_experts = num_experts;
  weight->cols = tensors.front().cols;
  std::vector<int64_t> offsets;
  int64_t bytes = 0;
  for (const HostTensor& t : tensors) {
    MetalMatrix m = matrix_of(t, num_experts);
    m.first_row = weight->rows;
    const int64_t tiles = (m.args.rows + kTileRows - 1) / kTileRows;
    m.args.expert_bytes = m.format < 0 ? int64_t(t.bytes) / num_experts : tiles * m.args.tile_bytes;
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    offsets.push_back(bytes);
    bytes += num_experts * m.args.expert_bytes;
    weight->rows += m.args.rows;
    weight->parts.push_back(m);
  }
  weight->bytes = bytes;
  weight->memory = device.alloc(size_t(bytes), tensors.front().name.c_str());
  for (size_t i = 0; i < tensors.size(); ++i) {
    uint8_t* const data = static_cast<uint8_t*>(weight->memory.get()) + offsets[i];
    weight->parts[i].data = data;
    copy(pool, tensors[i], num_experts, weight->parts[i], data);
  }
  const std::vector<float> bias = to_floats(biases, "Metal");  // [parts][experts, rows of the part]
  if (!bias.empty()) weight->bias_memory = to_device(device, bias, "biases");
  return weight;
}

std::unique_ptr<MetalVector> load_metal_vector(MetalDevice& device, const HostTensor& tensor) {
  auto weight = std::make_unique<MetalVector>();
  weight->rows = tensor.rows;
  weight->cols = tensor.cols;
  weight->memory = to_device(device, to_floats(tensor, "Metal"), tensor.name.c_str());
  return weight;
}

}  // namespace rvllm
