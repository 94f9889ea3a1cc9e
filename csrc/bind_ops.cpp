#include "bind_ops.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstring>

#include "backend.h"
#include "check.h"
#include "quant.h"

namespace py = pybind11;

namespace rvllm {
namespace {

using FloatArray = py::array_t<float, py::array::c_style | py::array::forcecast>;
using IntArray = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;

// A matrix in device memory with the contents of a NumPy array, or of a given shape.
class DeviceMatrix {
 public:
  DeviceMatrix(Backend& backend, int64_t rows, int64_t cols)
      : backend_(backend), data_(backend.alloc(rows * cols)), tensor(data_.get(), rows, cols) {}
  DeviceMatrix(Backend& backend, const FloatArray& a)
      : DeviceMatrix(backend, a.ndim() == 1 ? 1 : a.shape(0), a.ndim() == 1 ? a.shape(0) : a.shape(1)) {
    backend.upload(tensor.data, a.data(), a.size());
  }
  py::array_t<float> numpy() const {
    py::array_t<float> out({tensor.rows, tensor.cols});
    std::memcpy(out.mutable_data(), backend_.download(tensor), size_t(out.nbytes()));
    return out;
  }

 private:
  Backend& backend_;
  std::shared_ptr<float> data_;

 public:
  const Tensor tensor;
};

std::unique_ptr<Weight> vector_weight(Backend& backend, const FloatArray& a) {
  const int64_t rows = a.ndim() == 1 ? 1 : a.shape(0);
  return backend.load_vector({"weight", uint32_t(GgmlType::F32), rows, a.size() / rows,
                              reinterpret_cast<const uint8_t*>(a.data()), size_t(a.size()) * 4});
}

std::unique_ptr<Weight> matrix_weight(Backend& backend, uint32_t type, int64_t n, int64_t k, const py::bytes& data,
                                      const std::optional<FloatArray>& bias) {
  const std::string_view view(data);
  std::vector<HostTensor> biases;
  if (bias)
    biases.push_back({"bias", uint32_t(GgmlType::F32), 1, bias->size(),
                      reinterpret_cast<const uint8_t*>(bias->data()), size_t(bias->size()) * 4});
  return backend.load_weight(
      {{"weight", type, n, k, reinterpret_cast<const uint8_t*>(view.data()), view.size()}}, biases);
}

FloatArray linear(Backend& backend, uint32_t type, int64_t n, const py::bytes& weight, const FloatArray& x,
                  const std::optional<FloatArray>& bias) {
  const auto w = matrix_weight(backend, type, n, x.shape(1), weight, bias);
  const DeviceMatrix in(backend, x), out(backend, x.shape(0), n);
  backend.linear(out.tensor, in.tensor, *w);
  backend.synchronize();
  return out.numpy();
}

FloatArray embedding(Backend& backend, uint32_t type, int64_t n, int64_t k, const py::bytes& weight,
                     const IntArray& ids, float scale) {
  const auto w = matrix_weight(backend, type, n, k, weight, std::nullopt);
  for (int64_t i = 0; i < ids.size(); ++i)
    check(ids.data()[i] >= 0 && ids.data()[i] < n, "[embedding] id ", ids.data()[i], " is outside the ", n, " rows");
  Batch batch;
  batch.num_tokens = int(ids.size());
  batch.input_ids = ids.data();
  const DeviceMatrix out(backend, ids.size(), k);
  backend.begin_step(batch);
  backend.embedding(out.tensor, *w, scale);
  backend.end_step();
  return out.numpy();
}

// The parameters of a norm, and a view of them.
struct NormWeights {
  std::unique_ptr<Weight> weight, bias;
  Norm norm;

  NormWeights(Backend& backend, const FloatArray& values, const std::optional<FloatArray>& biases, float eps,
              NormKind kind)
      : weight(vector_weight(backend, values)), bias(biases ? vector_weight(backend, *biases) : nullptr),
        norm{weight.get(), bias.get(), eps, kind} {}
};

FloatArray norm(Backend& backend, const FloatArray& x, const FloatArray& weight, float eps,
                const std::optional<FloatArray>& bias, NormKind kind) {
  const NormWeights weights(backend, weight, bias, eps, kind);
  const DeviceMatrix in(backend, x), out(backend, x.shape(0), x.shape(1));
  backend.norm(out.tensor, in.tensor, weights.norm);
  backend.synchronize();
  return out.numpy();
}

FloatArray rope(Backend& backend, const FloatArray& x, int head_dim, const FloatArray& cos_sin, bool interleaved) {
  const DeviceMatrix in(backend, x), angles(backend, cos_sin);
  backend.rope(in.tensor, head_dim, angles.tensor, interleaved);
  backend.synchronize();
  return in.numpy();
}

FloatArray norm_linear(Backend& backend, uint32_t type, int64_t n, const py::bytes& weight, const FloatArray& x,
                       const FloatArray& norm, float eps, const std::optional<FloatArray>& bias, NormKind kind) {
  const NormWeights weights(backend, norm, bias, eps, kind);
  const auto w = matrix_weight(backend, type, n, x.shape(1), weight, std::nullopt);
  const DeviceMatrix in(backend, x), out(backend, x.shape(0), n);
  backend.norm_linear(out.tensor, in.tensor, weights.norm, *w);
  backend.synchronize();
  return out.numpy();
}

FloatArray activated_linear(Backend& backend, uint32_t type, int64_t n, const py::bytes& weight, const FloatArray& x,
                            Activation activation) {
  const int64_t k = is_gated(activation) ? x.shape(1) / 2 : x.shape(1);
  const auto w = matrix_weight(backend, type, n, k, weight, std::nullopt);
  const DeviceMatrix in(backend, x), out(backend, x.shape(0), n);
  backend.activated_linear(out.tensor, in.tensor, activation, *w);
  backend.synchronize();
  return out.numpy();
}

// Experts' matrices: ggml type, N, bytes of [experts, N, K], biases [experts, N] or None.
using PyExperts = std::tuple<uint32_t, int64_t, py::bytes, std::optional<FloatArray>>;

std::unique_ptr<Weight> expert_weight(Backend& backend, int num_experts, int64_t k, const PyExperts& experts) {
  const auto& [type, n, data, bias] = experts;
  const std::string_view view(data);
  std::vector<HostTensor> biases;
  if (bias)
    biases.push_back({"bias", uint32_t(GgmlType::F32), num_experts, n, reinterpret_cast<const uint8_t*>(bias->data()),
                      size_t(bias->size()) * 4});
  return backend.load_experts(num_experts, {{"weight", type, num_experts * n, k,
                                             reinterpret_cast<const uint8_t*>(view.data()), view.size()}}, biases);
}

// The weighted sum of what the experts chosen by logits [T, E] make of x [T, K]: of the first matrix alone, or of the
// second one behind an activation. The rest is RouterParams.
FloatArray mixture(Backend& backend, const FloatArray& logits, int num_used, bool normalized, const FloatArray& x,
                   const PyExperts& first, const std::optional<PyExperts>& second, Activation activation, bool sigmoid,
                   float scale, const std::optional<FloatArray>& router_bias) {
  const int num_experts = int(logits.shape(1));
  const int64_t tokens = x.shape(0), rows = tokens * num_used;
  const auto gate_up = expert_weight(backend, num_experts, x.shape(1), first);
  const DeviceMatrix router(backend, logits), in(backend, x), h(backend, rows, gate_up->rows);
  std::unique_ptr<Weight> bias;
  if (router_bias) bias = vector_weight(backend, *router_bias);
  backend.route(router.tensor, {num_used, normalized, sigmoid, scale, bias.get()});
  backend.expert_linear(h.tensor, in.tensor, *gate_up);
  if (!second) {
    const DeviceMatrix out(backend, tokens, gate_up->rows);
    backend.combine(out.tensor, h.tensor);
    backend.synchronize();
    return out.numpy();
  }
  const int64_t k = is_gated(activation) ? gate_up->rows / 2 : gate_up->rows;
  const auto down = expert_weight(backend, num_experts, k, *second);
  const DeviceMatrix y(backend, rows, down->rows), out(backend, tokens, down->rows);
  backend.activated_expert_linear(y.tensor, h.tensor, activation, *down);
  backend.combine(out.tensor, y.tensor);
  backend.synchronize();
  return out.numpy();
}

FloatArray add_gated(Backend& backend, const FloatArray& x, const FloatArray& y, const FloatArray& gate) {
  const DeviceMatrix a(backend, x), b(backend, y), g(backend, gate);
  backend.add_gated(a.tensor, b.tensor, g.tensor);
  backend.synchronize();
  return a.numpy();
}

FloatArray add(Backend& backend, const FloatArray& x, const FloatArray& y, float scale) {
  const DeviceMatrix a(backend, x), b(backend, y);
  backend.add(a.tensor, b.tensor, scale);
  backend.synchronize();
  return a.numpy();
}

py::array_t<int32_t> argmax(Backend& backend, const FloatArray& x) {
  const DeviceMatrix a(backend, x);
  return py::array_t<int32_t>(a.tensor.rows, backend.argmax(a.tensor));
}

FloatArray scale_logits(Backend& backend, const FloatArray& x, float scale, float soft_cap) {
  const DeviceMatrix a(backend, x);
  backend.scale_logits(a.tensor, scale, soft_cap);
  backend.synchronize();
  return a.numpy();
}

// Stores k, v [T', KVH * D], then attends with q [T, H * D]: one layer of two steps, the first of which has all tokens
// of the contexts, the second those that attend.
FloatArray attention(Backend& backend, const FloatArray& q, const FloatArray& k, const FloatArray& v,
                     const IntArray& positions, const IntArray& slot_mapping, const IntArray& query_start_loc,
                     const IntArray& context_lens, const IntArray& block_tables, int num_blocks, int block_size,
                     int num_heads, int num_kv_heads, int window, float scale, float soft_cap, KVType kv_type,
                     const std::optional<FloatArray>& sinks) {
  const int head_dim = int(q.shape(1)) / num_heads;
  const auto cache = backend.alloc_kv_cache({1, num_blocks, block_size, num_kv_heads, head_dim, kv_type});
  const DeviceMatrix keys(backend, k), values(backend, v), queries(backend, q), out(backend, q.shape(0), q.shape(1));
  Batch stored;
  stored.num_tokens = int(k.shape(0));
  stored.groups = {{int(block_tables.shape(1)), slot_mapping.data(), block_tables.data()}};
  Batch batch = stored;
  batch.num_tokens = int(q.shape(0));
  batch.num_requests = int(context_lens.size());
  batch.positions = positions.data();
  batch.query_start_loc = query_start_loc.data();
  batch.context_lens = context_lens.data();
  const auto sink_weight = sinks ? vector_weight(backend, *sinks) : nullptr;
  backend.begin_step(stored);
  backend.store_kv(*cache, 0, keys.tensor, values.tensor);
  backend.end_step();
  backend.begin_step(batch);
  backend.paged_attention(out.tensor, queries.tensor, *cache, 0,
                          {num_heads, num_kv_heads, head_dim, window, scale, soft_cap, sink_weight.get()});
  backend.end_step();
  backend.synchronize();
  return out.numpy();
}

}  // namespace

void bind_ops(py::module_& m) {
  py::module_ ops = m.def_submodule("ops", "The backend's operations on NumPy arrays, for tests and tools.");
  py::enum_<NormKind>(ops, "NormKind").value("rms", NormKind::kRms).value("layer", NormKind::kLayer);
  py::enum_<Activation> activation(ops, "Activation", "What is between the matrices of a feed-forward network.");
  for (int i = 0; i < kNumActivations; ++i) activation.value(kActivationNames[i], Activation(i));
  ops.def("linear", &linear, py::arg("backend"), py::arg("ggml_type"), py::arg("n"), py::arg("weight"), py::arg("x"),
          py::arg("bias") = py::none());
  ops.def("embedding", &embedding, py::arg("backend"), py::arg("ggml_type"), py::arg("n"), py::arg("k"),
          py::arg("weight"), py::arg("ids"), py::arg("scale") = 1.0f);
  ops.def("norm", &norm, py::arg("backend"), py::arg("x"), py::arg("weight"), py::arg("eps"),
          py::arg("bias") = py::none(), py::arg("kind") = NormKind::kRms);
  ops.def("rope", &rope, py::arg("backend"), py::arg("x"), py::arg("head_dim"), py::arg("cos_sin"),
          py::arg("interleaved"));
  ops.def("norm_linear", &norm_linear, py::arg("backend"), py::arg("ggml_type"), py::arg("n"), py::arg("weight"),
          py::arg("x"), py::arg("norm"), py::arg("eps"), py::arg("bias") = py::none(),
          py::arg("kind") = NormKind::kRms);
  ops.def("activated_linear", &activated_linear, py::arg("backend"), py::arg("ggml_type"), py::arg("n"),
          py::arg("weight"), py::arg("x"), py::arg("activation"));
  ops.def("mixture", &mixture, py::arg("backend"), py::arg("logits"), py::arg("num_used"), py::arg("normalized"),
          py::arg("x"), py::arg("first"), py::arg("second") = py::none(),
          py::arg("activation") = Activation::kSiluGated, py::arg("sigmoid") = false, py::arg("scale") = 1.0f,
          py::arg("router_bias") = py::none());
  ops.def("add_gated", &add_gated, py::arg("backend"), py::arg("x"), py::arg("y"), py::arg("gate"));
  ops.def("add", &add, py::arg("backend"), py::arg("x"), py::arg("y"), py::arg("scale") = 1.0f);
  ops.def("argmax", &argmax, py::arg("backend"), py::arg("x"));
  ops.def("scale_logits", &scale_logits, py::arg("backend"), py::arg("x"), py::arg("scale"), py::arg("soft_cap"));
  ops.def("attention", &attention, py::arg("backend"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("positions"),
          py::arg("slot_mapping"), py::arg("query_start_loc"), py::arg("context_lens"), py::arg("block_tables"),
          py::arg("num_blocks"), py::arg("block_size"), py::arg("num_heads"), py::arg("num_kv_heads"),
          py::arg("window") = 0, py::arg("scale") = 1.0f, py::arg("soft_cap") = 0.0f, py::arg("kv_type") = KVType::kF16,
          py::arg("sinks") = py::none());
}

}  // namespace rvllm
