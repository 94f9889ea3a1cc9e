// The decoders of the GGUF types whose codes are drawn from grids: a group of 8 weights (IQ3: 4) is one grid point,
// each weight with its sign. A weight's code is its place on the grid's axis, and its sign above that.
#pragma once

#include "quant.h"

namespace rvllm {

void decode_iq1_s(const uint8_t* block, Codes& codes);
void decode_iq1_m(const uint8_t* block, Codes& codes);
void decode_iq2_xxs(const uint8_t* block, Codes& codes);
void decode_iq2_xs(const uint8_t* block, Codes& codes);
void decode_iq2_s(const uint8_t* block, Codes& codes);
void decode_iq3_xxs(const uint8_t* block, Codes& codes);
void decode_iq3_s(const uint8_t* block, Codes& codes);

// IQ1: grid points -1, 0, 1 plus or minus an eighth, in eighths.
constexpr Codebook kCodebookIQ1{{-7, 1, 9, 0, -9, -1, 7, 0}, 0.125f};
constexpr Codebook kCodebookIQ2{{8, 25, 43, 0, -8, -25, -43, 0}, 0.125f};
constexpr Codebook kCodebookIQ3_XXS{{4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62}, 0.25f};
constexpr Codebook kCodebookIQ3_S{{1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15}, 1.0f};

}  // namespace rvllm
