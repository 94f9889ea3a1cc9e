// The backend's operations on NumPy arrays, one by one: how tests compare every backend with the reference.
#pragma once

#include <pybind11/pybind11.h>

namespace rvllm {

void bind_ops(pybind11::module_& m);

}  // namespace rvllm
