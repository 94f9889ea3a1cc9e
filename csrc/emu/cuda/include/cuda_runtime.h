// The CUDA runtime as the emulator has it: found before NVIDIA's header when a .cu file is compiled as C++. Names,
// values and rules are those of CUDA 13; what is not here, rvllm does not use.
#pragma once

#define RV_EMU 1

#include "emu/cuda/device_code.h"
#include "emu/cuda/runtime_api.h"
#include "emu/cuda/launch_kernel.h"
