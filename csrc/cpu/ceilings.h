// How fast this processor is at the two things that bound a model: reading memory, and multiplying int8 weights.
#pragma once

#include "backend.h"
#include "cpu/kernels.h"

namespace rvllm {

// The best of several tries counts: neighbours can only slow one down.
Ceilings measure_ceilings(ThreadPool& pool, const Kernels& kernels);

}  // namespace rvllm
