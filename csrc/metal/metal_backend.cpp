#include "metal/metal_backend.h"

#include <algorithm>
#include <cstring>

#include "check.h"
#include "clock.h"
#include "metal/metal_kv_cache.h"
#include "metal/metal_weights.h"

namespace rvllm {
namespace {

constexpr int kMaxQueryRows = 8;  // query rows (tokens x heads of one KV head) that share reads of keys and values
constexpr int kMaxHeadDim = 256;
constexpr int kMaxExperts = 1024;
constexpr int kMaxChoices = 1 << 20;
constexpr int kFewGroups = 64;    // below, attention gives every partition a group of its own

std::vector<KernelRow> kernel_table() {
  std::vector<KernelRow> rows = {
      {"norm_rms", "norm", 0, false}, {"norm_layer", "norm", 0, true},
      {"rope_halves", "rope", 1, false}, {"rope_pairs", "rope", 1, true},
  };
  const auto add = [&](const std::string& name) { rows.push_back({name, name}); };
  for (const char* name : {"add", "add_gated", "scale_logits", "gather_rows", "convert", "add_bias", "quantize",
                           "attention_merge", "route", "combine", "argmax"})
    add(name);
  rows.push_back({"sort_choices", "sort_choices", -1, false, 1024});
  for (const std::string format : kFormatNames)
    for (const std::string& name : {"embedding_" + format, "dequantize_" + format, "quantized_linear_" + format + "_1",
                                   "quantized_linear_" + format + "_8", "matmul_" + format})
      add(name);
  for (const std::string type : {"f32", "f16", "bf16"})
    for (const std::string& name : {"embedding_" + type, "matvec_" + type}) add(name);
  for (const char* name : {"matmul_f16", "matmul_bf16"}) add(name);
  for (const std::string type : kKVTypeNames) {
    add("store_kv_" + type);
    for (const char* rows_of_unit : {"_1", "_4", "_8"}) add("attention_" + type + rows_of_unit);
  }
  for (const std::string name : kActivationNames) add("activation_" + name);
  return rows;
}

int64_t divided_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// A thread an element.
GridSize grid_of(Tensor x) { return {x.rows, divided_up(x.cols, 256)}; }

RowArgs row_args(Tensor x, Tensor y = {}, float scale = 1, float soft_cap = 0) {
  return {int(x.stride), int(y.stride), 0, int(x.cols), scale, soft_cap};
}

const float* values(const Weight* vector) {
  return vector ? static_cast<const MetalVector*>(vector)->values() : nullptr;
}

// Activations as int8: the arrays of quantize.metal in one piece of memory.
struct QuantizedRows {
  uint8_t* codes = nullptr;
  float *scales = nullptr, *scaled_sums = nullptr;
  int* half_sums = nullptr;

  QuantizedRows() = default;
  static int64_t bytes(int64_t rows, int64_t k) { return divided_up(rows, 8) * (k / 32) * (256 + 8 * 16); }
  QuantizedRows(uint8_t* memory, int64_t rows, int64_t k) {
    const int64_t tiles = divided_up(rows, 8) * (k / 32);
    codes = memory;
    half_sums = reinterpret_cast<int*>(codes + tiles * 256);
    scales = reinterpret_cast<float*>(half_sums + tiles * 16);
    scaled_sums = scales + tiles * 8;
  }
};

}  // namespace

MetalBackend::MetalBackend(int num_threads, const std::string& library, bool f16_prefill, bool mps)
    : device_(library, kernel_table()), pool_(num_threads), f16_prefill_(f16_prefill), mps_(mps) {}

std::shared_ptr<float> MetalBackend::alloc(int64_t count) {
  return std::static_pointer_cast<float>(device_.alloc(size_t(count) * sizeof(float), "activations"));
}

void MetalBackend::upload(float* dst, const float* src, int64_t count) {
  device_.synchronize();  // what was encoded may read the old values
  std::memcpy(dst, src, size_t(count) * sizeof(float));
}

float* MetalBackend::download(Tensor x) {
  device_.synchronize();
  return x.data;
}

std::unique_ptr<Weight> MetalBackend::load_weight(const std::vector<HostTensor>& parts,
                                                  const std::vector<HostTensor>& biases) {
  return load_metal_weight(device_, pool_, 1, parts, biases);
}

std::unique_ptr<Weight> MetalBackend::load_experts(int num_experts, const std::vector<HostTensor>& parts,
                                                   const std::vector<HostTensor>& biases) {
  check(num_experts <= kMaxExperts, parts.front().name, ": ", num_experts, " experts, Metal has at most ", kMaxExperts);
  return load_metal_weight(device_, pool_, num_experts, parts, biases);
}

std::unique_ptr<Weight> MetalBackend::load_vector(const HostTensor& tensor) {
  return load_metal_vector(device_, tensor);
}

size_t MetalBackend::kv_cache_bytes(const KVCacheSpec& spec) const {
  return size_t(KVLayout(spec).layer_bytes()) * size_t(spec.num_layers);
}

std::unique_ptr<KVCache> MetalBackend::alloc_kv_cache(const KVCacheSpec& spec) {
  check(spec.head_dim <= kMaxHeadDim, "[kv_cache] heads of ", spec.head_dim, " dimensions, Metal has at most ",
        kMaxHeadDim);
  auto cache = std::make_unique<MetalKVCache>();
  cache->layout = KVLayout(spec);
  cache->memory = device_.alloc(kv_cache_bytes(spec), "the KV cache");
  return cache;
}

void MetalBackend::reserve(Scratch& scratch, int64_t bytes, const char* what) {
  if (scratch.bytes >= size_t(bytes)) return;
  scratch.memory.reset();
  scratch.memory = device_.alloc(size_t(bytes), what);
  scratch.bytes = size_t(bytes);
}

void MetalBackend::begin_step(const Batch& batch) {
  device_.synchronize();  // the arrays of the step before may still be read
  step_ = StepArrays(batch, kMaxQueryRows);
  reserve(batch_memory_, power_of_two(std::max<int64_t>(int64_t(step_.bytes()), 4096)), "the arrays of a step");
  std::memcpy(batch_memory_.as(), step_.data(), step_.bytes());
  step_.place(batch_memory_.as<const int>());
}

void MetalBackend::embedding(Tensor out, const Weight& table, float scale) {
  const MetalMatrix& m = static_cast<const MetalWeight&>(table).parts.front();
  device_.encode(m.kernel("embedding"), grid_of(out), 256, EmbeddingArgs{m.args, int(out.stride), scale},
                 {out.data, m.data, step_.input_ids});
}

void MetalBackend::norm(Tensor out, Tensor x, const Norm& norm) {
  const int n = int(norm.weight->cols);
  const NormArgs args{int(x.stride), int(out.stride), n, norm.weight->rows > 1, norm.bias != nullptr, norm.eps};
  device_.encode(norm.kind == NormKind::kLayer ? "norm_layer" : "norm_rms", {x.rows, x.cols / n},
                 n <= 128 ? 32 : n <= 512 ? 64 : 256, args, {out.data, x.data, values(norm.weight), values(norm.bias)});
}

void MetalBackend::norm_linear(Tensor out, Tensor x, const Norm& norm, const Weight& weight) {
  reserve(hidden_, x.rows * x.cols * int64_t(sizeof(float)), "activations");
  const Tensor hidden(hidden_.as<float>(), x.rows, x.cols);
  this->norm(hidden, x, norm);
  linear(out, hidden, weight);
}

Tensor MetalBackend::activated(Tensor x, Activation activation) {
  const int64_t cols = is_gated(activation) ? x.cols / 2 : x.cols;
  reserve(hidden_, x.rows * cols * int64_t(sizeof(float)), "activations");
  const Tensor hidden(hidden_.as<float>(), x.rows, cols);
  RowArgs args = row_args(x, hidden);
  args.cols = int(cols);
  device_.encode(std::string("activation_") + kActivationNames[int(activation)], grid_of(hidden), 256, args,
                 {hidden.data, x.data});
  return hidden;
}

void MetalBackend::activated_linear(Tensor out, Tensor x, Activation activation, const Weight& weight) {
  linear(out, activated(x, activation), weight);
}

bool MetalBackend::uses_tiles(const MetalMatrix& w, int64_t tokens, const ExpertRows* experts) const {
  if (experts || tokens <= kMatvecTokens) return false;
  return w.format >= 0 ? f16_prefill_ : w.type != GgmlType::F32;
}

void MetalBackend::multiply(Tensor out, Tensor x, const Weight& weight, const ExpertRows* experts, int per_source) {
  const auto& w = static_cast<const MetalWeight&>(weight);
  const ExpertRows rows = experts ? *experts : ExpertRows();
  const int64_t k = x.cols, places = experts ? 8 * int64_t(rows.num_tiles) : out.rows,
                token_tiles = divided_up(places, 8);
  const bool needs_int8 = std::any_of(w.parts.begin(), w.parts.end(), [&](const MetalMatrix& m) {
    return m.format >= 0 && !uses_tiles(m, out.rows, experts);
  });
  if (needs_int8) reserve(quantized_, QuantizedRows::bytes(places, k), "quantized activations");
  const QuantizedRows int8 = needs_int8 ? QuantizedRows(quantized_.as<uint8_t>(), places, k) : QuantizedRows();
  if (needs_int8)
    device_.encode("quantize", {out.rows, divided_up(k / 32, 8)}, 256,
                   QuantizeArgs{int(x.stride), per_source, int(k), experts != nullptr},
                   {int8.codes, int8.scales, int8.scaled_sums, int8.half_sums, x.data, rows.places});
  int64_t bias_at = 0;
  for (const MetalMatrix& m : w.parts) {
    const float* const bias = w.bias() ? w.bias() + bias_at : nullptr;
    bias_at += int64_t(m.args.rows) * w.num_experts;
    const Tensor columns = out.columns(m.first_row, m.args.rows);
    const LinearArgs args{m.args,           int(out.rows),   int(x.stride),      per_source,
                          int(out.stride),  bias != nullptr, experts != nullptr};
    if (uses_tiles(m, out.rows, experts) && fits_mps(m, out.rows))
      multiply_by_mps(columns, x, m, bias);
    else if (uses_tiles(m, out.rows, experts))
      device_.encode(m.kernel("matmul"), {divided_up(m.args.rows, 64), divided_up(out.rows, 32)}, 128, args,
                     {columns.data, m.data, x.data, bias});
    else if (m.format >= 0)
      device_.encode(m.kernel("quantized_linear") + (places == 1 ? "_1" : "_8"),
                     {divided_up(m.args.rows, 64), token_tiles}, 128, args,
                     {columns.data, m.data, int8.codes, int8.scales, int8.scaled_sums, int8.half_sums, bias,
                      rows.tile_expert, rows.choices});
    else
      device_.encode(m.kernel("matvec"), {divided_up(m.args.rows, 4), token_tiles}, 128, args,
                     {columns.data, m.data, x.data, bias, rows.tile_expert, rows.choices});
  }
}

// MPS has no product of BF16, and larger ones came out as NaN on M1 and M2 (JuliaGPU/Metal.jl#381).
bool MetalBackend::fits_mps(const MetalMatrix& w, int64_t tokens) const {
  return mps_ && w.type != GgmlType::BF16 && (tokens + 2 * int64_t(w.args.cols)) * w.args.rows * 4 < int64_t(1) << 31;
}

void MetalBackend::multiply_by_mps(Tensor out, Tensor x, const MetalMatrix& w, const float* bias) {
  const void* weight = w.data;
  if (w.format >= 0) {
    reserve(mps_weight_, int64_t(w.args.rows) * w.args.cols * 2, "dequantized weights");
    device_.encode(w.kernel("dequantize"), {w.args.rows, divided_up(w.args.cols, 256)}, 256, w.args,
                   {mps_weight_.as(), w.data});
    weight = mps_weight_.as();
  }
  reserve(mps_input_, x.rows * x.cols * 2, "activations for MPS");
  device_.encode("convert", grid_of(x), 256, row_args(x), {mps_input_.as(), x.data});
  device_.matmul_f16(out.data, out.stride, mps_input_.as(), weight, out.rows, out.cols, x.cols);
  if (bias) device_.encode("add_bias", grid_of(out), 256, row_args(out), {out.data, bias});
}

void MetalBackend::rope(Tensor x, int head_dim, Tensor cos_sin, bool interleaved) {
  const RopeArgs args{int(x.stride), int(x.cols) / head_dim, head_dim, int(cos_sin.cols) / 2};
  device_.encode(interleaved ? "rope_pairs" : "rope_halves", {x.rows, divided_up(args.heads * args.half_width, 128)},
                 128, args, {x.data, cos_sin.data});
}

void MetalBackend::store_kv(KVCache& cache, int layer, Tensor k, Tensor v) {
  const auto& kv = static_cast<const MetalKVCache&>(cache);
  device_.encode(std::string("store_kv_") + kKVTypeNames[int(kv.layout.type)], {k.rows, kv.layout.num_kv_heads, 2},
                 int(divided_up(kv.layout.head_dim, 32)) * 32, StoreArgs{kv.args(), int(k.stride), int(v.stride)},
                 {kv.layer(layer), k.data, v.data, step_.groups[size_t(cache.group)].slot_mapping});
}

void MetalBackend::paged_attention(Tensor out, Tensor q, const KVCache& cache, int layer,
                                   const AttentionParams& params) {
  const auto& kv = static_cast<const MetalKVCache&>(cache);
  const StepArrays::Tables& tables = step_.groups[size_t(cache.group)];
  AttentionArgs args{};
  args.cache = kv.args();
  args.q_stride = int(q.stride);
  args.out_stride = int(out.stride);
  args.max_blocks = tables.max_blocks;
  args.num_heads = params.num_heads;
  args.group = params.num_heads / params.num_kv_heads;
  args.heads_a_unit = std::min(args.group, kMaxQueryRows);
  args.window = params.window;
  args.has_sinks = params.sinks != nullptr;
  args.scale = params.scale;
  args.soft_cap = params.soft_cap;
  const StepArrays::Units& units = step_.units(args.heads_a_unit);
  const int64_t partitions = step_.partitions(params.window);
  const int64_t heads = params.num_kv_heads * divided_up(args.group, args.heads_a_unit);
  if (partitions > 1 && units.count * heads < kFewGroups) {
    args.num_parts = int(partitions) + (units.tokens > 1 ? 1 : 0);
    reserve(partitions_, q.rows * params.num_heads * args.num_parts * (2 + params.head_dim) * int64_t(sizeof(float)),
            "partitions of attention");
  }
  const int rows = units.tokens * args.heads_a_unit, most_rows = rows <= 1 ? 1 : rows <= 4 ? 4 : 8;
  device_.encode(std::string("attention_") + kKVTypeNames[int(kv.layout.type)] + "_" + std::to_string(most_rows),
                 {units.count, heads, std::max(1, args.num_parts)}, kPartition, args,
                 {out.data, q.data, kv.layer(layer), units.data, step_.positions, tables.block_tables,
                  values(params.sinks), args.num_parts > 0 ? partitions_.as() : nullptr},
                 size_t(most_rows) * (size_t(kv.layout.padded_dim) + kPartition) * sizeof(float));
  if (args.num_parts > 0)
    device_.encode("attention_merge", {q.rows, params.num_heads}, int(divided_up(params.head_dim, 32)) * 32, args,
                   {out.data, step_.positions, values(params.sinks), partitions_.as()});
}

void MetalBackend::route(Tensor logits, const RouterParams& params) {
  ExpertRows& e = experts_;
  e.num_used = params.num_used;
  check(logits.rows * params.num_used <= kMaxChoices, logits.rows, " tokens of ", params.num_used,
        " experts each, Metal has at most ", kMaxChoices, " choices a step");
  e.num_choices = int(logits.rows) * params.num_used;
  e.num_tiles = (e.num_choices + 7 * std::min(e.num_choices, int(logits.cols)) + 7) / 8;
  reserve(expert_memory_, (3 * int64_t(e.num_choices) + 9 * int64_t(e.num_tiles)) * 4, "choices of experts");
  e.experts = expert_memory_.as<int>();
  e.weights = reinterpret_cast<float*>(e.experts + e.num_choices);
  e.places = e.experts + 2 * e.num_choices;
  e.choices = e.places + e.num_choices;
  e.tile_expert = e.choices + 8 * e.num_tiles;
  const ExpertArgs args{int(logits.stride),     0, int(logits.cols),  e.num_used,     e.num_choices,
                        e.num_tiles,            0, params.normalized, params.sigmoid, params.bias != nullptr,
                        params.scale,           kLeastScores};
  device_.encode("route", {logits.rows}, 32, args, {logits.data, e.experts, e.weights, values(params.bias)});
  device_.encode("sort_choices", {}, 1024, args, {e.experts, e.places, e.choices, e.tile_expert});
}

void MetalBackend::expert_linear(Tensor out, Tensor x, const Weight& experts) {
  multiply(out, x, experts, &experts_, experts_.num_used);
}

void MetalBackend::activated_expert_linear(Tensor out, Tensor x, Activation activation, const Weight& experts) {
  multiply(out, activated(x, activation), experts, &experts_, 1);
}

void MetalBackend::combine(Tensor out, Tensor y) {
  ExpertArgs args{};
  args.stride = int(y.stride);
  args.out_stride = int(out.stride);
  args.num_used = experts_.num_used;
  args.cols = int(out.cols);
  device_.encode("combine", grid_of(out), 256, args, {out.data, y.data, experts_.weights});
}

void MetalBackend::add(Tensor x, Tensor y, float scale) {
  device_.encode("add", grid_of(x), 256, row_args(x, y, scale), {x.data, y.data});
}

void MetalBackend::add_gated(Tensor x, Tensor y, Tensor gate) {
  RowArgs args = row_args(x, y);
  args.z_stride = int(gate.stride);
  device_.encode("add_gated", grid_of(x), 256, args, {x.data, y.data, gate.data});
}

void MetalBackend::gather_rows(Tensor out, Tensor x) {
  RowArgs args = row_args(x, out);
  device_.encode("gather_rows", grid_of(out), 256, args, {out.data, x.data, step_.logits_indices});
}

const int32_t* MetalBackend::argmax(Tensor x) {
  reserve(best_, x.rows * int64_t(sizeof(int32_t)), "the best tokens");
  device_.encode("argmax", {x.rows}, 256, row_args(x), {best_.as(), x.data});
  device_.synchronize();
  return best_.as<const int32_t>();
}

void MetalBackend::scale_logits(Tensor x, float scale, float soft_cap) {
  device_.encode("scale_logits", grid_of(x), 256, row_args(x, {}, scale, soft_cap), {x.data});
}

// A sum of two arrays, of which three times their size is moved, and a product of many rows and tokens.
Ceilings MetalBackend::measure_ceilings() {
  constexpr int kTimes = 4;
  constexpr int64_t rows = 2048, cols = 4096, k = 1024;
  const auto seconds = [&](const auto& work) {
    work();
    synchronize();
    const int64_t start = now_ns();
    for (int i = 0; i < kTimes; ++i) work();
    synchronize();
    return 1e-9 * double(now_ns() - start) / kTimes;
  };
  const auto x = alloc(rows * cols), y = alloc(rows * cols);
  std::memset(x.get(), 0, size_t(rows * cols) * sizeof(float));
  std::memset(y.get(), 0, size_t(rows * cols) * sizeof(float));
  const double sum = seconds([&] { add(Tensor(x.get(), rows, cols), Tensor(y.get(), rows, cols), 1.0f); });
  const std::vector<uint8_t> blocks(size_t(rows * k / 32) * sizeof(BlockQ4_0));
  const auto weight = load_weight({{"ceiling", uint32_t(GgmlType::Q4_0), rows, k, blocks.data(), blocks.size()}}, {});
  const double product = seconds([&] { linear(Tensor(y.get(), 256, rows), Tensor(x.get(), 256, k), *weight); });
  return {3.0 * double(rows * cols) * sizeof(float) / sum, 256.0 * double(rows) * double(k) / product};
}

}  // namespace rvllm
