// The Python module rvllm._cuda: one function that gives a Backend, the class of rvllm._core.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cuda/cuda_backend.h"

namespace py = pybind11;

PYBIND11_MODULE(_cuda, m) {
  using namespace rvllm;
  using namespace rvllm::cuda;
  m.doc() = "rvllm on NVIDIA GPUs";
  py::module_::import("rvllm._core");  // has the class Backend

  // Local to the module: the tests load a second one, over the emulator, beside this.
  py::class_<CudaBackend, Backend, std::shared_ptr<CudaBackend>>(m, "CudaBackend", py::module_local())
      .def_property_readonly("memory_info", &CudaBackend::memory_info, "(bytes of device memory free, bytes in all)")
      .def_property_readonly("num_replayed", &CudaBackend::num_replayed, "Steps that were replayed as graphs.");

  m.def("make_backend",
        [](int num_threads, const std::vector<std::string>& cublas, int device, bool f16_prefill, bool graphs,
           int num_processors) {
          return std::make_shared<CudaBackend>(
              CudaOptions{device, num_threads, f16_prefill, graphs, cublas, num_processors});
        },
        py::arg("num_threads"), py::arg("cublas") = std::vector<std::string>(), py::arg("device") = 0,
        py::arg("f16_prefill") = false, py::arg("graphs") = true, py::arg("num_processors") = 0,
        "The backend of one GPU. num_threads: of the host. cublas: where to look for cuBLAS. num_processors: of the "
        "GPU for which work is cut, by default its own. Raises RuntimeError saying what is missing.");
}
