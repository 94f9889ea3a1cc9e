#include "cpu/cpu_backend.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "check.h"
#include "cpu/ceilings.h"
#include "cpu/cpu_features.h"
#include "cpu/cpu_kv_cache.h"
#include "cpu/repack.h"

namespace rvllm {
namespace {

// Matrices of one K that are multiplied together: query, key and value, or gate and up. They may differ in type.
class CpuWeight final : public Weight {
 public:
  struct Part {
    PackedType type;
    const Codebook* codebook;
    int64_t rows, first_row, tile_bytes;
    uint8_t* data;  // in the backend's arena
    int tiles() const { return int((rows + kTileCols - 1) / kTileCols); }
  };
  std::vector<Part> parts;
  std::vector<float> bias;
  bool has_quantized = false;
};

constexpr int64_t kPieceBytes = 8 << 20;  // of weights repacked at a time

const TypeInfo& checked_type(const HostTensor& t) {
  const TypeInfo* type = find_type(t.type);
  check(type != nullptr, t.name, ": ggml type ", t.type, " has no CPU kernel");
  check(t.cols % type->block_size == 0, t.name, ": rows of ", t.cols, " weights are no whole number of ", type->name,
        " blocks of ", type->block_size);
  check(t.bytes == size_t(t.rows * (t.cols / type->block_size) * type->block_bytes), t.name, ": ", t.bytes,
        " bytes for ", t.rows, " x ", t.cols, " weights of type ", type->name);
  return *type;
}

std::vector<float> to_floats(const HostTensor& t) {
  const TypeInfo& type = checked_type(t);
  std::vector<float> values(size_t(t.rows * t.cols));
  dequantize_row(type, t.data, values.data(), t.rows * t.cols);
  if (t.consumed) t.consumed(t.bytes);
  return values;
}

}  // namespace

CpuBackend::CpuBackend(int num_threads, const std::string& isa)
    : kernels_(select_kernels(isa)), pool_(num_threads) {}

Ceilings CpuBackend::measure_ceilings() { return rvllm::measure_ceilings(pool_, kernels_); }

std::shared_ptr<float> CpuBackend::alloc(int64_t count) {
  void* p = nullptr;  // not aligned_alloc, which older macOS does not have
  if (posix_memalign(&p, 64, size_t(count) * sizeof(float)) != 0) throw std::bad_alloc();
  return {static_cast<float*>(p), std::free};
}

void CpuBackend::upload(float* dst, const float* src, int64_t count) {
  std::memcpy(dst, src, size_t(count) * sizeof(float));
}

std::unique_ptr<Weight> CpuBackend::load_weight(const std::vector<HostTensor>& tensors,
                                                const std::vector<HostTensor>& biases) {
  auto weight = std::make_unique<CpuWeight>();
  weight->cols = tensors.front().cols;
  for (const HostTensor& t : tensors) {
    const TypeInfo& type = checked_type(t);
    CpuWeight::Part part;
    part.type = packed_type(type);
    part.codebook = type.codebook;
    part.rows = t.rows;
    part.first_row = weight->rows;
    part.tile_bytes = packed_tile_bytes(part.type, t.cols);
    part.data = arena_.take(size_t(part.tiles() * part.tile_bytes));
    // Piece by piece, so that a large tensor is not in memory twice.
    const int64_t piece = std::max<int64_t>(4 * pool_.size(), kPieceBytes / part.tile_bytes);
    for (int64_t first = 0; first < part.tiles(); first += piece) {
      const int64_t count = std::min(piece, part.tiles() - first);
      pool_.parallel_for(count, 4, [&](int64_t begin, int64_t end, int) {
        for (int64_t tile = first + begin; tile < first + end; ++tile)
          repack_tile(type, t.data, t.rows, t.cols, tile, part.data + tile * part.tile_bytes);
      });
      if (t.consumed) t.consumed(size_t(std::min(t.rows, (first + count) * kTileCols)) * (t.bytes / size_t(t.rows)));
    }
    weight->rows += t.rows;
    weight->bytes += part.tiles() * part.tile_bytes;
    weight->has_quantized |= type.decode != nullptr;
    weight->parts.push_back(std::move(part));
  }
  for (const HostTensor& t : biases) {
    const std::vector<float> values = to_floats(t);
    weight->bias.insert(weight->bias.end(), values.begin(), values.end());
  }
  return weight;
}

std::unique_ptr<Weight> CpuBackend::load_vector(const HostTensor& tensor) {
  auto weight = std::make_unique<CpuVector>();
  weight->rows = tensor.rows;
  weight->cols = tensor.cols;
  weight->values = to_floats(tensor);
  return weight;
}

size_t CpuBackend::kv_cache_bytes(const KVCacheSpec& s) const {
  return size_t(s.num_blocks) * CpuKVCache::block_stride(s);
}

std::unique_ptr<KVCache> CpuBackend::alloc_kv_cache(const KVCacheSpec& spec) {
  return std::make_unique<CpuKVCache>(spec);
}

template <class Body>
void CpuBackend::for_rows(int64_t rows, const Body& body) {
  const int64_t grain = std::max<int64_t>(1, rows / (4 * pool_.size()));
  pool_.parallel_for(rows, grain, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t row = begin; row < end; ++row) body(row, thread);
  });
}

void CpuBackend::begin_step(const Batch& batch) {
  batch_ = &batch;
  attention_plans_.clear();
}

void CpuBackend::embedding(Tensor out, const Weight& table, float scale) {
  const auto& part = static_cast<const CpuWeight&>(table).parts.front();
  for_rows(out.rows, [&](int64_t t, int) {
    const int32_t id = batch_->input_ids[t];
    const uint8_t* tile = part.data + id / kTileCols * part.tile_bytes;
    kernels_.unpack_row[int(part.type)]({tile, id % kTileCols, int(out.cols), part.codebook}, out.row(t));
    if (scale != 1.0f) kernels_.scale(out.row(t), scale, 0.0f, int(out.cols));
  });
}

void CpuBackend::norm_row(const float* x, int64_t cols, const Norm& norm, float* out) const {
  const auto& weight = static_cast<const CpuVector&>(*norm.weight);
  const float* const bias = norm.bias ? static_cast<const CpuVector*>(norm.bias)->values.data() : nullptr;
  for (int64_t c = 0; c < cols; c += weight.cols) {
    const float* const values = weight.values.data() + (weight.rows > 1 ? c : 0);
    if (norm.kind == NormKind::kLayer)
      kernels_.layer_norm(x + c, values, bias, norm.eps, int(weight.cols), out + c);
    else
      kernels_.rms_norm(x + c, values, norm.eps, int(weight.cols), out + c);
  }
}

void CpuBackend::norm(Tensor out, Tensor x, const Norm& norm) {
  for_rows(x.rows, [&](int64_t t, int) { norm_row(x.row(t), x.cols, norm, out.row(t)); });
}

QuantizedRows CpuBackend::quantized_rows(int64_t rows, int64_t k) {
  const size_t blocks = size_t(rows * k / kBlock);
  if (sum_.size() < blocks) {
    q_.resize(blocks * kBlock);
    scale_.resize(blocks);
    scaled_sum_.resize(blocks);
    sum_.resize(blocks);
    half_sum_.resize(2 * blocks);
  }
  return {q_.data(), scale_.data(), scaled_sum_.data(), sum_.data(), half_sum_.data()};
}

void CpuBackend::linear(Tensor out, Tensor x, const Weight& weight) {
  multiply(out, x, weight, [](int64_t) {});
}

void CpuBackend::norm_linear(Tensor out, Tensor x, const Norm& norm, const Weight& weight) {
  const Tensor h = linear_input(x.rows, x.cols);
  multiply(out, h, weight, [&](int64_t t) { norm_row(x.row(t), x.cols, norm, h.row(t)); });
}

void CpuBackend::activated_linear(Tensor out, Tensor x, Activation activation, const Weight& weight) {
  const Tensor h = linear_input(x.rows, is_gated(activation) ? x.cols / 2 : x.cols);
  multiply(out, h, weight, [&](int64_t t) { kernels_.activate(x.row(t), activation, int(h.cols), h.row(t)); });
}

Tensor CpuBackend::linear_input(int64_t rows, int64_t k) {
  if (int64_t(linear_input_.size()) < rows * k) linear_input_.resize(size_t(rows * k));
  return Tensor(linear_input_.data(), rows, k);
}

// make_row(t) writes row t of x just before it is quantized, while it is in the first-level cache.
template <class MakeRow>
void CpuBackend::multiply(Tensor out, Tensor x, const Weight& weight, const MakeRow& make_row) {
  const auto& w = static_cast<const CpuWeight&>(weight);
  LinearArgs args{};
  args.k = int(x.cols);
  args.rows = int(x.rows);
  args.x = x.data;
  args.x_stride = x.stride;
  args.out_stride = out.stride;
  if (w.has_quantized) args.xq = quantized_rows(x.rows, x.cols);
  for_rows(x.rows, [&](int64_t t, int) {
    make_row(t);
    if (w.has_quantized) kernels_.quantize_rows(x.data, x.stride, args.k, args.xq, int(t), int(t) + 1);
  });
  for (const CpuWeight::Part& part : w.parts) {
    args.weight = part.data;
    args.tile_bytes = part.tile_bytes;
    args.codebook = part.codebook;
    args.n = int(part.rows);
    args.bias = w.bias.empty() ? nullptr : w.bias.data() + part.first_row;
    args.out = out.data + part.first_row;
    const int64_t grain = std::clamp<int64_t>(part.tiles() / (4 * pool_.size()), 1, 64);
    pool_.parallel_for(part.tiles(), grain, [&](int64_t begin, int64_t end, int) {
      kernels_.linear[int(part.type)](args, int(begin), int(end));
    });
  }
}

void CpuBackend::rope(Tensor x, int head_dim, Tensor cos_sin, bool interleaved) {
  for_rows(x.rows, [&](int64_t t, int) {
    kernels_.rope(x.row(t), int(x.cols) / head_dim, head_dim, int(cos_sin.cols), interleaved, cos_sin.row(t));
  });
}

void CpuBackend::store_kv(KVCache& cache, int layer, Tensor k, Tensor v) {
  const auto& kv = static_cast<const CpuKVCache&>(cache);
  const int d = kv.spec.head_dim, block_size = kv.spec.block_size;
  const auto store = kernels_.store_kv[int(kv.spec.type)];
  const int32_t* const slot_mapping = batch_->groups[size_t(kv.group)].slot_mapping;
  for_rows(k.rows, [&](int64_t t, int) {
    const int slot = slot_mapping[t];
    for (int h = 0; h < kv.spec.num_kv_heads; ++h) {
      store(k.row(t) + h * d, v.row(t) + h * d, d, block_size, slot % block_size,
            kv.head(layer, h) + slot / block_size * kv.block_stride());
    }
  });
}

void CpuBackend::add(Tensor x, Tensor y, float scale) {
  for_rows(x.rows, [&](int64_t t, int) { kernels_.add(x.row(t), y.row(t), scale, int(x.cols)); });
}

void CpuBackend::scale_logits(Tensor x, float scale, float soft_cap) {
  for_rows(x.rows, [&](int64_t t, int) { kernels_.scale(x.row(t), scale, soft_cap, int(x.cols)); });
}

void CpuBackend::gather_rows(Tensor out, Tensor x) {
  for (int64_t i = 0; i < out.rows; ++i)
    std::memcpy(out.row(i), x.row(batch_->logits_indices[i]), size_t(x.cols) * sizeof(float));
}

}  // namespace rvllm
