// Binds the profiler and what it measures itself by.
#pragma once

#include <pybind11/pybind11.h>

namespace rvllm {

void bind_profiler(pybind11::module_& m);  // after Backend

}  // namespace rvllm
