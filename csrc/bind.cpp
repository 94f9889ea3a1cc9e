// The Python module rvllm._core: the CPU backend, the model, the sampler. Arrays of a step come in as int32, token ids
// and log-probabilities go out; the GIL is released while the step runs.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <variant>

#include "check.h"
#include "bind_ops.h"
#include "bind_profiler.h"
#include "cpu/cpu_backend.h"
#include "cpu/cpu_features.h"
#include "model.h"
#include "pooler.h"
#include "quant.h"
#include "sampler.h"

namespace py = pybind11;

namespace rvllm {
namespace {

using IntArray = py::array_t<int32_t, py::array::c_style>;

// A step's arrays, kept alive while native code reads them; slot_mapping [G, T] and block_tables [G, B, max_blocks]
// have a part for each group of layers.
struct StepArrays {
  IntArray input_ids, positions, slot_mapping, query_start_loc, context_lens, block_tables, logits_indices;

  Batch batch() const {
    check(slot_mapping.ndim() == 2, "[step] slot_mapping has ", slot_mapping.ndim(), " dimensions, expected 2");
    check(block_tables.ndim() == 3, "[step] block_tables has ", block_tables.ndim(), " dimensions, expected 3");
    Batch b;
    b.num_tokens = int(input_ids.size());
    b.num_requests = int(context_lens.size());
    b.num_logits = int(logits_indices.size());
    check(b.num_tokens > 0 && b.num_requests > 0, "[step] the batch is empty");
    check(positions.size() == b.num_tokens && slot_mapping.shape(1) == b.num_tokens &&
              query_start_loc.size() == b.num_requests + 1 && block_tables.shape(1) == b.num_requests &&
              slot_mapping.shape(0) == block_tables.shape(0),
          "[step] the arrays of the batch do not agree in length");
    b.input_ids = input_ids.data();
    b.positions = positions.data();
    b.query_start_loc = query_start_loc.data();
    b.context_lens = context_lens.data();
    b.logits_indices = logits_indices.data();
    for (int64_t g = 0; g < block_tables.shape(0); ++g)
      b.groups.push_back({int(block_tables.shape(2)), slot_mapping.data() + g * b.num_tokens,
                          block_tables.data() + g * b.num_requests * block_tables.shape(2)});
    return b;
  }
};

// find(name) gives (type id, rows, cols, buffer) or None.
TensorSource tensor_source(const py::function& find, const py::function& consumed) {
  return [find, consumed](const std::string& name) -> std::optional<HostTensor> {
    const py::object found = find(name);
    if (found.is_none()) return std::nullopt;
    const auto [type, rows, cols, data] = found.cast<std::tuple<uint32_t, int64_t, int64_t, py::buffer>>();
    const py::buffer_info info = data.request();
    return HostTensor{name, type, rows, cols, static_cast<const uint8_t*>(info.ptr), size_t(info.size * info.itemsize),
                      [consumed, name](size_t bytes) { consumed(name, bytes); }};
  };
}

constexpr const char* kQkNormNames[] = {"", "head", "heads", "row"};

template <size_t N>
int index_of(const char* const (&names)[N], const std::string& name) {
  const auto at = std::find(std::begin(names), std::end(names), name);
  check(at != std::end(names), "[config] '", name, "' is unknown");
  return int(at - std::begin(names));
}

ModelConfig model_config(const py::dict& d) {
  ModelConfig c;
  c.num_layers = d["num_layers"].cast<int>();
  c.hidden_size = d["hidden_size"].cast<int>();
  c.num_heads = d["num_heads"].cast<int>();
  c.num_kv_heads = d["num_kv_heads"].cast<int>();
  c.head_dim = d["head_dim"].cast<int>();
  c.intermediate_size = d["intermediate_size"].cast<int>();
  c.vocab_size = d["vocab_size"].cast<int>();
  c.num_experts = d["num_experts"].cast<int>();
  c.num_experts_per_tok = d["num_experts_per_tok"].cast<int>();
  c.moe_intermediate_size = d["moe_intermediate_size"].cast<int>();
  c.shared_expert_intermediate_size = d["shared_expert_intermediate_size"].cast<int>();
  c.first_k_dense_replace = d["first_k_dense_replace"].cast<int>();
  c.sigmoid_router = d["sigmoid_router"].cast<bool>();
  c.norm_topk_prob = d["norm_topk_prob"].cast<bool>();
  c.routed_scaling_factor = d["routed_scaling_factor"].cast<double>();
  c.norm_kind = d["layer_norm"].cast<bool>() ? NormKind::kLayer : NormKind::kRms;
  c.norm_eps = d["norm_eps"].cast<double>();
  c.activation = Activation(index_of(kActivationNames, d["activation"].cast<std::string>()));
  c.pre_norms = d["pre_norms"].cast<bool>();
  c.ffn_norm = d["ffn_norm"].cast<std::string>();
  c.post_norms = d["post_norms"].cast<bool>();
  c.parallel_block = d["parallel_block"].cast<bool>();
  c.qk_norm = QkNorm(index_of(kQkNormNames, d["qk_norm"].cast<std::string>()));
  c.qk_norm_after_rope = d["qk_norm_after_rope"].cast<bool>();
  c.residual_scale = d["residual_scale"].cast<double>();
  c.logit_scale = d["logit_scale"].cast<double>();
  c.logit_soft_cap = d["logit_soft_cap"].cast<double>();
  c.embedding_scale = d["embedding_scale"].cast<double>();
  c.attention_scale = d["attention_scale"].cast<double>();
  c.attention_soft_cap = d["attention_soft_cap"].cast<double>();
  c.attn_sinks = d["attn_sinks"].cast<bool>();
  c.rope_interleaved = d["rope_interleaved"].cast<bool>();
  std::tie(c.temperature_scale, c.temperature_length) = d["attention_temperature"].cast<std::pair<double, int>>();
  for (auto& [inv_freq, scale] : d["rope_tables"].cast<std::vector<std::pair<std::vector<double>, double>>>())
    c.rope_tables.push_back({std::move(inv_freq), scale});
  for (const auto& [rope, window] : d["layers"].cast<std::vector<std::pair<int, int>>>())
    c.layers.push_back({rope, window});
  return c;
}

// A sampler, or (token id, number of alternatives) to score.
using PyReader = std::variant<Sampler*, std::pair<int32_t, int>>;

py::object entries(const std::vector<Logprob>& logprobs) {
  if (logprobs.empty()) return py::none();
  py::list out;
  for (const Logprob& l : logprobs) out.append(py::make_tuple(l.token_id, l.logprob, l.rank));
  return out;
}

// Runs the step; for each row of logits, what its reader made of it:
// (token id, None or [(token id, logprob, rank), ...], None or error), the token's own entry first.
// pooled: (pooler, begin, end), the tokens of the step that it takes. before_sampling: called when there are logits.
py::list step(Model& model, const StepArrays& arrays, const std::vector<PyReader>& readers,
              const std::vector<std::tuple<Pooler*, int, int>>& pooled,
              const std::optional<py::function>& before_sampling) {
  const Batch batch = arrays.batch();
  std::vector<LogitsReader> logits_readers;
  for (const PyReader& reader : readers)
    if (const auto* target = std::get_if<1>(&reader)) {
      logits_readers.push_back({nullptr, target->first, target->second});
    } else {
      check(std::get<0>(reader) != nullptr, "[step] row ", logits_readers.size(), " has no sampler");
      logits_readers.push_back({std::get<0>(reader)});
    }
  std::vector<PooledTokens> pooled_tokens;
  for (const auto& [pooler, begin, end] : pooled) pooled_tokens.push_back({pooler, begin, end});
  std::function<void()> before;
  if (before_sampling)
    before = [&] {
      py::gil_scoped_acquire acquire;
      (*before_sampling)();
    };
  std::vector<Sample> samples;
  {
    py::gil_scoped_release release;
    samples = model.step(batch, logits_readers, pooled_tokens, before);
  }
  py::list out;
  for (const Sample& sample : samples) {
    const py::object error = sample.error.empty() ? py::object(py::none()) : py::str(sample.error);
    out.append(py::make_tuple(sample.token_id, entries(sample.logprobs), error));
  }
  return out;
}

py::array_t<float> logits(Model& model, const StepArrays& arrays) {
  const Batch batch = arrays.batch();
  py::array_t<float> out({py::ssize_t(batch.num_logits), py::ssize_t(model.config().vocab_size)});
  float* data = out.mutable_data();
  py::gil_scoped_release release;
  model.logits(batch, data);
  return out;
}

py::array_t<float> dequantize(uint32_t type, const py::buffer& data) {
  const TypeInfo* info = find_type(type);
  check(info != nullptr, "[dequantize] ggml type ", type, " is not supported");
  py::buffer_info bytes = data.request();
  const int64_t size = bytes.size * bytes.itemsize;
  check(PyBuffer_IsContiguous(bytes.view(), 'C') && size % info->block_bytes == 0, "[dequantize] ", size,
        " bytes are no whole ", info->name, " blocks of ", info->block_bytes, " on end");
  py::array_t<float> out(size / info->block_bytes * info->block_size);
  float* values = out.mutable_data();
  py::gil_scoped_release release;
  dequantize_row(*info, static_cast<const uint8_t*>(bytes.ptr), values, out.size());
  return out;
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Kernels* table : available_kernels()) names.emplace_back(table->name);
  return names;
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "Native core of rvllm";

  m.def("available_isas", &available_isas, "Names of the kernel tables this machine can run, slowest first.");
  m.def("detect_isa", [] { return std::string(select_kernels("").name); },
        "Name of the kernel table in use: RVLLM_ISA, or the best. Raises ValueError when it is not available.");
  m.def("supports_type", [](uint32_t type) { return find_type(type) != nullptr; }, py::arg("ggml_type"));

  m.def("dequantize", &dequantize, py::arg("ggml_type"), py::arg("data"), "The weights of whole blocks, as float32.");

  py::class_<Backend, std::shared_ptr<Backend>>(m, "Backend")
      .def_property_readonly("name", &Backend::name)
      .def_property_readonly("num_threads", [](Backend& b) { return b.pool().size(); });
  py::enum_<KVType> kv_type(m, "KVType", "How elements of keys and values are kept.");
  for (int i = 0; i < kNumKVTypes; ++i) kv_type.value(kKVTypeNames[i], KVType(i));

  py::class_<CpuBackend, Backend, std::shared_ptr<CpuBackend>>(m, "CpuBackend")
      .def(py::init<int, const std::string&>(), py::arg("num_threads"), py::arg("isa") = "")
      .def_property_readonly("isa", [](const CpuBackend& b) { return std::string(b.isa()); });

  py::class_<Sampler>(m, "Sampler")
      .def(py::init([](int vocab_size, double temperature, double top_p, int top_k, double min_p,
                       double repetition_penalty, double presence_penalty, double frequency_penalty, uint64_t seed,
                       uint32_t index, int min_tokens, int num_logprobs, std::vector<int32_t> prompt_token_ids,
                       std::vector<int32_t> stop_token_ids, std::vector<std::pair<int32_t, float>> logit_bias) {
             auto in_vocabulary = [&](int32_t id) {
               check(id >= 0 && id < vocab_size, "[sampler] token id ", id, " is outside the vocabulary of ",
                     vocab_size);
             };
             for (int32_t id : prompt_token_ids) in_vocabulary(id);
             for (int32_t id : stop_token_ids) in_vocabulary(id);
             for (const auto& [id, bias] : logit_bias) in_vocabulary(id);
             return Sampler({vocab_size, temperature, top_p, top_k, min_p, repetition_penalty, presence_penalty,
                             frequency_penalty, seed, index, min_tokens, num_logprobs, std::move(prompt_token_ids),
                             std::move(stop_token_ids), std::move(logit_bias)});
           }),
           py::kw_only(), py::arg("vocab_size"), py::arg("temperature") = 1.0, py::arg("top_p") = 1.0,
           py::arg("top_k") = 0, py::arg("min_p") = 0.0, py::arg("repetition_penalty") = 1.0,
           py::arg("presence_penalty") = 0.0, py::arg("frequency_penalty") = 0.0, py::arg("seed") = 0,
           py::arg("index") = 0, py::arg("min_tokens") = 0, py::arg("num_logprobs") = -1,
           py::arg("prompt_token_ids") = std::vector<int32_t>(), py::arg("stop_token_ids") = std::vector<int32_t>(),
           py::arg("logit_bias") = std::vector<std::pair<int32_t, float>>())
      .def("sample",
           [](Sampler& self, py::array_t<float, py::array::c_style | py::array::forcecast> logits) {
             check(logits.size() == self.vocab_size(), "[sampler] ", logits.size(), " logits for a vocabulary of ",
                   self.vocab_size());
             std::vector<float> row(logits.data(), logits.data() + logits.size());
             const Sample sample = self.sample(row.data());
             return py::make_tuple(sample.token_id, entries(sample.logprobs));
           },
           py::arg("logits"),
           "Samples from float32 [vocab_size]: (token id, None or [(token id, logprob, rank), ...]).")
      .def("set_allowed",
           [](Sampler& self, const IntArray& words) {
             self.set_allowed(std::vector<int32_t>(words.data(), words.data() + words.size()));
           },
           py::arg("words"), "Of which tokens the next one is: bit i % 32 of int32 word i // 32.");

  py::class_<Pooler>(m, "Pooler")
      .def(py::init([](int pooling, int hidden_size, int num_tokens) {
             return Pooler(Pooling(pooling), hidden_size, num_tokens);
           }),
           py::arg("pooling"), py::arg("hidden_size"), py::arg("num_tokens"))
      .def("embedding", &Pooler::embedding);

  py::class_<StepArrays>(m, "StepArrays", "The int32 arrays of one step; shapes are those of Batch in backend.h.")
      .def(py::init<IntArray, IntArray, IntArray, IntArray, IntArray, IntArray, IntArray>(), py::arg("input_ids"),
           py::arg("positions"), py::arg("slot_mapping"), py::arg("query_start_loc"), py::arg("context_lens"),
           py::arg("block_tables"), py::arg("logits_indices"));

  py::class_<Model>(m, "Model")
      .def(py::init([](std::shared_ptr<Backend> backend, const py::dict& config, const py::function& find,
                       const py::function& consumed) {
             return std::make_unique<Model>(std::move(backend), model_config(config), tensor_source(find, consumed));
           }),
           py::arg("backend"), py::arg("config"), py::arg("find"), py::arg("consumed"))
      .def_property_readonly("windows", &Model::windows)
      .def("alloc_kv_cache", &Model::alloc_kv_cache, py::arg("num_blocks"), py::arg("block_size"),
           py::arg("type") = KVType::kF16)
      .def("kv_cache_bytes", &Model::kv_cache_bytes, py::arg("group"), py::arg("num_blocks"), py::arg("block_size"),
           py::arg("type") = KVType::kF16)
      .def("step", &step, py::arg("arrays"), py::arg("readers"),
           py::arg("pooled") = std::vector<std::tuple<Pooler*, int, int>>(), py::arg("before_sampling") = py::none())
      .def("logits", &logits, py::arg("arrays"), "Logits of logits_indices as float32 [B', vocab_size].");

  bind_ops(m);
  bind_profiler(m);
}

}  // namespace rvllm
