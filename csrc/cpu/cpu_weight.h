// Parameters as the CPU backend keeps them.
#pragma once

#include <vector>

#include "backend.h"
#include "cpu/packed.h"

namespace rvllm {

// Matrices of one K that are multiplied together: query, key and value, or gate and up. They may differ in type. Of a
// mixture of experts each expert has its own; all else is a mixture of one.
class CpuWeight final : public Weight {
 public:
  struct Part {
    PackedType type;
    const Codebook* codebook;
    int64_t rows, first_row, tile_bytes;
    uint8_t* data;  // [experts, tiles], in the backend's arena
    int tiles() const { return int((rows + kTileCols - 1) / kTileCols); }
    const uint8_t* expert(int e) const { return data + int64_t(e) * tiles() * tile_bytes; }
  };
  std::vector<Part> parts;
  std::vector<float> bias;  // [experts, N], or none
  bool has_quantized = false;

  int tiles() const {
    int count = 0;
    for (const Part& part : parts) count += part.tiles();
    return count;
  }
};

// Norm weights, sinks: [rows, cols] floats.
class CpuVector final : public Weight {
 public:
  std::vector<float> values;
};

}  // namespace rvllm
