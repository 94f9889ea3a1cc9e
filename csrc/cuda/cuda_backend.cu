#include "cuda/cuda_backend.h"

#include <algorithm>
#include <cstring>

#include "check.h"
#include "clock.h"
#include "cuda/cuda_weights.h"
#include "cuda/operations.h"
#include "cuda/rows.h"

namespace rvllm::cuda {
namespace {

constexpr int64_t kMaxPartitionBytes = int64_t(128) << 20;  // that attention may take beside the KV cache

// Selects the device before any member is made on it.
const CudaOptions& on_its_device(const CudaOptions& options) {
  require_device(options.device);
  return options;
}

}  // namespace

CudaBackend::CudaBackend(const CudaOptions& options)
    : options_(on_its_device(options)), pool_(options.num_threads), graphs_(stream_, options.graphs),
      staging_(stream_) {
  num_processors_ = options.num_processors;
  if (num_processors_ == 0)
    check_cuda(cudaDeviceGetAttribute(&num_processors_, cudaDevAttrMultiProcessorCount, options.device),
               "asking for the number of processors");
}

// In any thread, and cuBLAS goes with the device that it came with. Nothing goes while work may use it.
CudaBackend::~CudaBackend() {
  cudaSetDevice(options_.device);
  cudaStreamSynchronize(stream_);
}

// The device that CUDA works with is each thread's own, and a model may be loaded in one and run in another.
void CudaBackend::use_device() const { check_cuda(cudaSetDevice(options_.device), "selecting the device"); }

std::pair<size_t, size_t> CudaBackend::memory_info() const {
  use_device();
  size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "asking for free memory");
  return {free, total};
}

std::shared_ptr<float> CudaBackend::alloc(int64_t count) {
  use_device();
  const size_t bytes = size_t(std::max<int64_t>(count, 1)) * sizeof(float);
  return std::static_pointer_cast<float>(device_memory(bytes, "activations"));
}

void CudaBackend::upload(float* dst, const float* src, int64_t count) {
  use_device();
  graphs_.discard();  // of a step that failed: others have run all their work
  const size_t bytes = size_t(count) * sizeof(float);
  void* const pinned = staging_.take(bytes);
  std::memcpy(pinned, src, bytes);
  check_cuda(cudaMemcpyAsync(dst, pinned, bytes, cudaMemcpyHostToDevice, stream_), "copying to the device");
}

void CudaBackend::synchronize() {
  graphs_.flush();
  check_cuda(cudaStreamSynchronize(stream_), "waiting for the device");
  staging_.synchronized();
}

float* CudaBackend::download(Tensor x) {
  return static_cast<float*>(
      to_host(x.data, size_t(x.stride) * sizeof(float), size_t(x.cols) * sizeof(float), size_t(x.rows)));
}

// Rows that lie `pitch` bytes apart, to pinned memory, without gaps.
void* CudaBackend::to_host(const void* data, size_t pitch, size_t width, size_t rows) {
  use_device();
  const size_t bytes = width * rows;
  if (download_bytes_ < bytes) {
    void* p = nullptr;
    download_bytes_ = 0;
    download_memory_.reset();
    check_cuda(cudaMallocHost(&p, bytes), "allocating pinned memory");
    download_memory_ = std::shared_ptr<void>(p, [](void* q) { cudaFreeHost(q); });
    download_bytes_ = bytes;
  }
  graphs_.flush();
  if (bytes > 0)
    check_cuda(cudaMemcpy2DAsync(download_memory_.get(), width, data, pitch, width, rows, cudaMemcpyDeviceToHost,
                                 stream_),
               "copying from the device");
  synchronize();
  return download_memory_.get();
}

std::unique_ptr<Weight> CudaBackend::load_weight(const std::vector<HostTensor>& parts,
                                                 const std::vector<HostTensor>& biases) {
  use_device();
  graphs_.forget();  // they know weights by their addresses, where others may have been before
  auto weight = load_cuda_weight(pool_, 1, parts, biases);
  // A missing cuBLAS must show now, not at the first long prompt.
  for (const DeviceMatrix& m : weight->parts)
    if (may_use_blas(m)) blas();
  return weight;
}

std::unique_ptr<Weight> CudaBackend::load_experts(int num_experts, const std::vector<HostTensor>& parts,
                                                  const std::vector<HostTensor>& biases) {
  use_device();
  graphs_.forget();
  return load_cuda_weight(pool_, num_experts, parts, biases);
}

std::unique_ptr<Weight> CudaBackend::load_vector(const HostTensor& tensor) {
  use_device();
  graphs_.forget();
  return load_cuda_vector(tensor);
}

size_t CudaBackend::kv_cache_bytes(const KVCacheSpec& spec) const {
  return size_t(KVLayout(spec).layer_bytes()) * size_t(spec.num_layers);
}

std::unique_ptr<KVCache> CudaBackend::alloc_kv_cache(const KVCacheSpec& spec) {
  check(spec.head_dim <= kMaxHeadDim, "[kv_cache] heads of ", spec.head_dim, " dimensions, CUDA has at most ",
        kMaxHeadDim);
  use_device();
  graphs_.forget();
  auto cache = std::make_unique<CudaKVCache>();
  cache->layout = KVLayout(spec);
  cache->memory = device_memory(kv_cache_bytes(spec), "the KV cache");
  cache->layout.data = static_cast<uint8_t*>(cache->memory.get());
  return cache;
}

void CudaBackend::reserve(Scratch& scratch, int64_t bytes, const char* what) {
  if (scratch.bytes >= size_t(bytes)) return;
  // What has been noted finds the new memory when it runs; graphs would not.
  graphs_.forget();
  scratch.bytes = 0;
  scratch.memory.reset();
  scratch.memory = device_memory(size_t(bytes), what);
  scratch.bytes = size_t(bytes);
}

// All arrays go up in one copy.
void CudaBackend::begin_step(const Batch& batch) {
  use_device();
  step_ = StepArrays(batch, kMaxQueryRows);
  const size_t bytes = step_.bytes();
  reserve(batch_memory_, power_of_two(std::max<int64_t>(int64_t(bytes), 4096)), "the arrays of a step");
  void* const pinned = staging_.take(bytes);
  std::memcpy(pinned, step_.data(), bytes);
  check_cuda(cudaMemcpyAsync(batch_memory_.as(), pinned, bytes, cudaMemcpyHostToDevice, stream_), "copying a batch");
  step_.place(batch_memory_.as<const int>());
  open_ = {};
  graphs_.begin();
}

void CudaBackend::embedding(Tensor out, const Weight& table, float scale) {
  const DeviceMatrix* const part = &static_cast<const CudaWeight&>(table).parts.front();
  const int* const ids = step_.input_ids;
  enqueue(with(signature(kEmbedding, out), part->data, ids, scale),
          [=] { cuda::embedding(out, *part, ids, scale, stream_); });
}

NormRow CudaBackend::norm_row(Tensor x, const Norm& norm) const {
  const auto* const bias = static_cast<const CudaVector*>(norm.bias);
  return {x.data, x.stride, static_cast<const CudaVector*>(norm.weight)->values(), bias ? bias->values() : nullptr,
          norm.eps, norm.kind == NormKind::kLayer, 0.0f, 0.0f};
}

void CudaBackend::norm(Tensor out, Tensor x, const Norm& norm) {
  const NormRow row = norm_row(x, norm);
  const int n = int(norm.weight->cols);
  const bool by_head = norm.weight->rows > 1;
  enqueue(with(signature(kNorm, out, x), row.weight, row.bias, row.eps, row.is_layer_norm, n),
          [=] { cuda::norm(out, x, row, n, by_head, stream_); });
}

void CudaBackend::rope(Tensor x, int head_dim, Tensor cos_sin, bool interleaved) {
  const uint64_t key = with(signature(kRope, x, cos_sin), head_dim, interleaved).value();
  // Keys lie behind queries: one kernel rotates both.
  if (open_.rotated && is_open() && x.data == open_.rotated->data + open_.rotated->cols &&
      x.rows == open_.rotated->rows && x.stride == open_.rotated->stride && cos_sin.data == open_.cos_sin.data &&
      cos_sin.cols == open_.cos_sin.cols && head_dim == open_.head_dim && interleaved == open_.interleaved) {
    open_.rotated->cols += x.cols;
    graphs_.extend(key);
    return;
  }
  const auto rotated = std::make_shared<Tensor>(x);
  graphs_.add(key, [=] { cuda::rope(*rotated, head_dim, cos_sin, interleaved, stream_); });
  open_ = {};
  open_.num_noted = graphs_.num_noted();
  open_.rotated = rotated;
  open_.cos_sin = cos_sin;
  open_.head_dim = head_dim;
  open_.interleaved = interleaved;
}

void CudaBackend::store_kv(KVCache& cache, int layer, Tensor k, Tensor v) {
  const auto& kv = static_cast<const CudaKVCache&>(cache);
  const KVLayout layout = kv.layer(layer);
  const int* const slots = step_.groups[size_t(cache.group)].slot_mapping;
  enqueue(with(signature(kStoreKv, k, v), layout.data, slots), [=] { cuda::store_kv(layout, k, v, slots, stream_); });
}

void CudaBackend::paged_attention(Tensor out, Tensor q, const KVCache& cache, int layer,
                                  const AttentionParams& params) {
  const auto& kv = static_cast<const CudaKVCache&>(cache);
  const StepArrays::Tables& tables = step_.groups[size_t(cache.group)];
  AttentionArgs args{};
  args.cache = kv.layer(layer);
  args.q = q.data;
  args.q_stride = q.stride;
  args.out = out.data;
  args.out_stride = out.stride;
  args.positions = step_.positions;
  args.block_tables = tables.block_tables;
  args.max_blocks = tables.max_blocks;
  args.num_heads = params.num_heads;
  args.group = params.num_heads / params.num_kv_heads;
  args.heads_a_unit = std::min(args.group, kMaxQueryRows);
  args.window = params.window;
  args.scale = params.scale;
  args.soft_cap = params.soft_cap;
  args.sinks = params.sinks ? static_cast<const CudaVector*>(params.sinks)->values() : nullptr;
  const StepArrays::Units& units = step_.units(args.heads_a_unit);
  args.units = units.data;
  const int num_units = units.count, rows = units.tokens * args.heads_a_unit, tokens = int(q.rows);
  // With few units, every partition gets a block of its own, and the results are merged: a power of two of them, since
  // each number makes a graph of its own.
  const int64_t partitions = step_.partitions(params.window);
  const int blocks = num_units * params.num_kv_heads * ((args.group + args.heads_a_unit - 1) / args.heads_a_unit);
  const int64_t num_parts = power_of_two(partitions + (units.tokens > 1 ? 1 : 0));
  const int64_t bytes = int64_t(tokens) * params.num_heads * num_parts * (2 + params.head_dim) * int64_t(sizeof(float));
  const bool splits = partitions > 1 && blocks < 4 * num_processors_ && bytes <= kMaxPartitionBytes;
  if (splits) {
    args.num_parts = int(num_parts);
    reserve(partitions_, bytes, "partitions of attention");
  }
  enqueue(with(signature(kAttention, out, q), args.cache.data, args.units, num_units, rows, args.num_parts, args.window,
               args.block_tables, args.max_blocks, args.scale, args.soft_cap, args.sinks),
          [=] {
            AttentionArgs now = args;
            now.parts = splits ? partitions_.as<float>() : nullptr;
            attention(now, num_units, rows, tokens, stream_);
          });
}

void CudaBackend::add(Tensor x, Tensor y, float scale) {
  if (open_.residual && is_open() && open_.out.data == y.data && open_.out.rows == y.rows &&
      open_.out.cols == y.cols && open_.out.stride == y.stride) {
    *open_.residual = {x.data, x.stride, scale};
    open_ = {};
    graphs_.extend(with(signature(kAdd, x, y), scale).value());
    return;
  }
  enqueue(with(signature(kAdd, x, y), scale), [=] { cuda::add(x, y, scale, stream_); });
}

void CudaBackend::add_gated(Tensor x, Tensor y, Tensor gate) {
  enqueue(with(signature(kAddGated, x, y), gate.data, gate.stride),
          [=] { cuda::add_gated(x, y, gate, stream_); });
}

void CudaBackend::gather_rows(Tensor out, Tensor x) {
  const int* const rows = step_.logits_indices;
  enqueue(with(signature(kGatherRows, out, x), rows), [=] { cuda::gather_rows(out, x, rows, stream_); });
}

const int32_t* CudaBackend::argmax(Tensor x) {
  const size_t bytes = size_t(x.rows) * sizeof(int);
  reserve(best_, int64_t(bytes), "the best tokens");
  enqueue(signature(kArgmax, x), [=] { cuda::argmax(best_.as<int>(), x, stream_); });
  return static_cast<const int32_t*>(to_host(best_.memory.get(), bytes, bytes, 1));
}

void CudaBackend::scale_logits(Tensor x, float scale, float soft_cap) {
  enqueue(with(signature(kScaleLogits, x), scale, soft_cap), [=] { cuda::scale_logits(x, scale, soft_cap, stream_); });
}

// A copy of memory, which is read and written, and products of a size that every processor has several tiles of.
Ceilings CudaBackend::measure_ceilings() {
  constexpr int kTimes = 8;
  use_device();
  const auto seconds = [&](const auto& work) {
    work();
    check_cuda(cudaStreamSynchronize(stream_), "warming up");
    const int64_t start = now_ns();
    for (int i = 0; i < kTimes; ++i) work();
    check_cuda(cudaStreamSynchronize(stream_), "measuring");
    return 1e-9 * double(now_ns() - start) / kTimes;
  };
  const int64_t bytes = int64_t(num_processors_) << 21, size = int64_t(num_processors_) * kTileRows, k = 1024;
  const auto from = device_memory(size_t(bytes), "measuring"), to = device_memory(size_t(bytes), "measuring");
  const double copy = seconds([&] {
    check_cuda(cudaMemcpyAsync(to.get(), from.get(), size_t(bytes), cudaMemcpyDeviceToDevice, stream_), "copying");
  });
  const std::vector<float> zeros(size_t(size * k));
  const auto x = alloc(size * k), out = alloc(size * size);
  upload(x.get(), zeros.data(), size * k);
  const std::vector<uint8_t> blocks(size_t(size * k / 32) * sizeof(BlockQ4_0));
  const auto weight = load_cuda_weight(
      pool_, 1, {{"ceiling", uint32_t(GgmlType::Q4_0), size, k, blocks.data(), blocks.size()}}, {});
  const double product = seconds([&] { linear(Tensor(out.get(), size, size), Tensor(x.get(), size, k), *weight); });
  return {2.0 * double(bytes) / copy, double(size) * double(size) * double(k) / product};
}

}  // namespace rvllm::cuda
