// Which kernel tables this machine can run.
#pragma once

#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace rvllm {

// The tables this processor and operating system can run, slowest first; "scalar" is always there.
std::vector<const Kernels*> available_kernels();

// The best table, or the one named by `isa` (empty: RVLLM_ISA, else the best).
// Throws invalid_argument naming the ISA and the available ones.
const Kernels& select_kernels(const std::string& isa);

}  // namespace rvllm
