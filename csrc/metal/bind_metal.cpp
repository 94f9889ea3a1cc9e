// The Python module rvllm._metal: one function that gives a Backend, the class of rvllm._core.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "metal/metal_backend.h"

namespace py = pybind11;

PYBIND11_MODULE(_metal, m) {
  using namespace rvllm;
  m.doc() = "rvllm on Apple GPUs";
  py::module_::import("rvllm._core");  // has the class Backend

  py::class_<MetalBackend, Backend, std::shared_ptr<MetalBackend>>(m, "MetalBackend")
      .def_property_readonly("device_name", &MetalBackend::device_name)
      .def_property_readonly("memory_info", &MetalBackend::memory_info, "(bytes of device memory free, bytes in all)");

  m.def("make_backend",
        [](int num_threads, const std::string& library, bool f16_prefill, bool mps) {
          return std::make_shared<MetalBackend>(num_threads, library, f16_prefill, mps);
        },
        py::arg("num_threads"), py::arg("library"), py::arg("f16_prefill") = false, py::arg("mps") = false,
        "The backend of this machine's GPU. num_threads: of the host. library: the kernels, compiled (.metallib) or as "
        "source. mps: for many tokens MPSMatrixMultiplication takes the place of the kernel `matmul`. Raises "
        "RuntimeError saying what is missing.");
}
