// The GGUF tensor formats: block structs as they lie in the file, and their scalar decoding.
//
// A quantized weight is w = D * (q - zero) + M with integer codes q; D and M belong to a block of 32 weights (or to
// 16 of them, as D * sub_scale). Decoding to codes is what repacking needs; decoding to floats is the truth the
// kernels are tested against.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rvllm {

enum class GgmlType : uint32_t {
  F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8,
  Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30,
};

constexpr int kBlock = 32;   // weights that share one scale, and activations that share one
constexpr int kSuper = 256;  // weights in one K-quant super-block

#pragma pack(push, 1)
struct BlockQ4_0 { uint16_t d; uint8_t qs[16]; };                  // low nibbles: k 0..15, high: k 16..31
struct BlockQ4_1 { uint16_t d, m; uint8_t qs[16]; };
struct BlockQ5_0 { uint16_t d; uint8_t qh[4]; uint8_t qs[16]; };   // qh: fifth bit of each k
struct BlockQ5_1 { uint16_t d, m; uint8_t qh[4]; uint8_t qs[16]; };
struct BlockQ8_0 { uint16_t d; int8_t qs[32]; };
struct BlockQ2_K { uint8_t scales[16]; uint8_t qs[64]; uint16_t d, dmin; };  // scales: 4-bit scale, 4-bit min
struct BlockQ3_K { uint8_t hmask[32]; uint8_t qs[64]; uint8_t scales[12]; uint16_t d; };
struct BlockQ4_K { uint16_t d, dmin; uint8_t scales[12]; uint8_t qs[128]; };
struct BlockQ5_K { uint16_t d, dmin; uint8_t scales[12]; uint8_t qh[32]; uint8_t qs[128]; };
struct BlockQ6_K { uint8_t ql[128]; uint8_t qh[64]; int8_t scales[16]; uint16_t d; };
#pragma pack(pop)

static_assert(sizeof(BlockQ4_0) == 18 && sizeof(BlockQ4_1) == 20 && sizeof(BlockQ5_0) == 22);
static_assert(sizeof(BlockQ5_1) == 24 && sizeof(BlockQ8_0) == 34 && sizeof(BlockQ2_K) == 84);
static_assert(sizeof(BlockQ3_K) == 110 && sizeof(BlockQ4_K) == 144 && sizeof(BlockQ5_K) == 176);
static_assert(sizeof(BlockQ6_K) == 210);

// Codes and scales of kSuper weights (K-quants) or of one block of 32, in logical k order.
struct Codes {
  uint8_t q[kSuper];     // unsigned codes; Q8_0: the bits of an int8
  uint16_t d, dmin;      // f16; dmin is M of Q4_1 and Q5_1
  int8_t scale[16];      // K-quants: sub-scale of each 16 weights (Q4_K, Q5_K: of each 32, first 8 entries)
  uint8_t min[16];       // Q2_K, Q4_K, Q5_K: sub-minimum, likewise
};

struct TypeInfo {
  GgmlType type;
  const char* name;
  int block_size;        // weights in one block of the file
  int block_bytes;
  void (*decode)(const uint8_t* block, Codes& codes);  // null for the float types
};

// The row of the table for a ggml type id, or null when the type is not supported.
const TypeInfo* find_type(uint32_t type);

// Decodes n weights of one row to floats; n is a multiple of the type's block size.
void dequantize_row(const TypeInfo& type, const uint8_t* src, float* dst, int64_t n);

float f16_to_f32(uint16_t h);
uint16_t f32_to_f16(float f);  // nearest even; overflow gives infinity

inline float bf16_to_f32(uint16_t h) {
  const uint32_t bits = uint32_t(h) << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}

}  // namespace rvllm
