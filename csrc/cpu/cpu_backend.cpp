#include "cpu/cpu_backend.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "cpu/ceilings.h"
#include "cpu/cpu_features.h"
#include "cpu/cpu_kv_cache.h"
#include "cpu/cpu_weight.h"
#include "sampler.h"

namespace rvllm {
namespace {

constexpr int kRangeRows = 512;  // times tiles, for a thread at a time: all of a busy expert would keep others waiting

std::vector<ExpertRows> all_rows(Tensor x) { return {{0, 0, int(x.rows)}}; }

QuantizedRows from_row(const QuantizedRows& x, int64_t row) {
  return {x.q + row * kBlock, x.scale + row, x.scaled_sum + row, x.sum + row, x.half_sum + 2 * row, x.rows};
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

size_t CpuBackend::kv_cache_bytes(const KVCacheSpec& s) const {
  return size_t(s.num_blocks) * CpuKVCache::block_bytes(s);
}

std::unique_ptr<KVCache> CpuBackend::alloc_kv_cache(const KVCacheSpec& spec) {
  return std::make_unique<CpuKVCache>(spec);
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
    q_ = alloc(int64_t(blocks * kBlock / sizeof(float)));
    scale_.resize(blocks);
    scaled_sum_.resize(blocks);
    half_sum_.resize(2 * blocks);
    sum_.resize(blocks);  // last: where it is long enough, so are the others
  }
  return {reinterpret_cast<int8_t*>(q_.get()), scale_.data(), scaled_sum_.data(), sum_.data(), half_sum_.data(), rows};
}

void CpuBackend::linear(Tensor out, Tensor x, const Weight& weight) {
  multiply(out, x, weight, all_rows(x), {});
}

void CpuBackend::norm_linear(Tensor out, Tensor x, const Norm& norm, const Weight& weight) {
  const Tensor h = linear_input(x.rows, x.cols);
  multiply(out, h, weight, all_rows(h), [&](int64_t t) { norm_row(x.row(t), x.cols, norm, h.row(t)); });
}

void CpuBackend::activated_linear(Tensor out, Tensor x, Activation activation, const Weight& weight) {
  multiply_activated(out, x, activation, weight, all_rows(x));
}

void CpuBackend::multiply_activated(Tensor out, Tensor x, Activation activation, const Weight& weight,
                                    const std::vector<ExpertRows>& groups) {
  const Tensor h = linear_input(x.rows, is_gated(activation) ? x.cols / 2 : x.cols);
  multiply(out, h, weight, groups,
           [&](int64_t t) { kernels_.activate(x.row(t), activation, int(h.cols), h.row(t)); });
}

Tensor CpuBackend::linear_input(int64_t rows, int64_t k) {
  if (int64_t(linear_input_.size()) < rows * k) linear_input_.resize(size_t(rows * k));
  return Tensor(linear_input_.data(), rows, k);
}

void CpuBackend::multiply(Tensor out, Tensor x, const Weight& weight, const std::vector<ExpertRows>& groups,
                          const std::function<void(int64_t)>& make_row) {
  const auto& w = static_cast<const CpuWeight&>(weight);
  QuantizedRows xq{};
  if (w.has_quantized) xq = quantized_rows(x.rows, x.cols);
  for_rows(x.rows, [&](int64_t t, int) {
    if (make_row) make_row(t);
    if (w.has_quantized) kernels_.quantize_rows(x.data, x.stride, int(x.cols), xq, int(t), int(t) + 1);
  });
  const int64_t group_tiles = w.tiles(), tiles = group_tiles * int64_t(groups.size());
  int most_rows = 1;
  for (const ExpertRows& group : groups) most_rows = std::max(most_rows, group.count);
  const int64_t grain = std::clamp<int64_t>(tiles / (4 * pool_.size()), 1, std::clamp(kRangeRows / most_rows, 1, 64));
  pool_.parallel_for(tiles, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end;) {
      const ExpertRows& group = groups[size_t(i / group_tiles)];
      int tile = int(i % group_tiles);
      auto part = w.parts.begin();
      for (; tile >= part->tiles(); ++part) tile -= part->tiles();
      const int count = int(std::min<int64_t>(end - i, part->tiles() - tile));
      LinearArgs args{};
      args.weight = part->expert(group.expert);
      args.tile_bytes = part->tile_bytes;
      args.codebook = part->codebook;
      args.k = int(x.cols);
      args.n = int(part->rows);
      args.rows = group.count;
      args.x = x.row(group.first);
      args.x_stride = x.stride;
      if (w.has_quantized) args.xq = from_row(xq, group.first);
      args.bias = w.bias.empty() ? nullptr : w.bias.data() + group.expert * w.rows + part->first_row;
      args.out = out.row(group.first) + part->first_row;
      args.out_stride = out.stride;
      kernels_.linear[int(part->type)](args, tile, tile + count);
      i += count;
    }
  });
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
            kv.head(layer, h).block(slot / block_size));
    }
  });
}

void CpuBackend::add(Tensor x, Tensor y, float scale) {
  for_rows(x.rows, [&](int64_t t, int) { kernels_.add(x.row(t), y.row(t), scale, int(x.cols)); });
}

const int32_t* CpuBackend::argmax(Tensor x) {
  best_.resize(size_t(x.rows));
  for_rows(x.rows, [&](int64_t t, int) { best_[size_t(t)] = best_token(x.row(t), int(x.cols)); });
  return best_.data();
}

void CpuBackend::scale_logits(Tensor x, float scale, float soft_cap) {
  for_rows(x.rows, [&](int64_t t, int) { kernels_.scale(x.row(t), scale, soft_cap, int(x.cols)); });
}

void CpuBackend::gather_rows(Tensor out, Tensor x) {
  for (int64_t i = 0; i < out.rows; ++i)
    std::memcpy(out.row(i), x.row(batch_->logits_indices[i]), size_t(x.cols) * sizeof(float));
}

}  // namespace rvllm
