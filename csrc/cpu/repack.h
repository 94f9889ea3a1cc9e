// From the layout of a GGUF file to the tiles of packed.h.
#pragma once

#include <cstdint>

#include "cpu/packed.h"

namespace rvllm {

// The packed type of a ggml type; every supported ggml type has one.
PackedType packed_type(const TypeInfo& type);

// Bytes of one tile of 16 columns.
int64_t packed_tile_bytes(PackedType type, int64_t k);

// Packs rows [16 tile, 16 tile + 16) of a [n, k] matrix; rows beyond n become zeros.
void repack_tile(const TypeInfo& type, const uint8_t* rows, int64_t n, int64_t k, int64_t tile, uint8_t* out);

}  // namespace rvllm
