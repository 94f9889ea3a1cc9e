// The GGUF tensor formats: block structs as they lie in the file, and their scalar decoding.
//
// A quantized weight is w = D * (q - zero) + M, or w = D * values[q], with integer codes q; D and M belong to a block
// of 32 weights (or to 16 of them, as D * sub_scale). Decoding to codes is what repacking needs; decoding to floats is
// the truth the kernels are tested against. No STL here: the ISA files include it.
#pragma once

#include <stdint.h>

namespace rvllm {

enum class GgmlType : uint32_t {
  F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8,
  Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ2_XXS = 16, IQ2_XS = 17, IQ3_XXS = 18, IQ1_S = 19,
  IQ4_NL = 20, IQ3_S = 21, IQ2_S = 22, IQ4_XS = 23, IQ1_M = 29, BF16 = 30, TQ1_0 = 34, TQ2_0 = 35, MXFP4 = 39,
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
struct BlockTQ1_0 { uint8_t qs[48]; uint8_t qh[4]; uint16_t d; };  // a byte: five digits of base 3 (qh: four)
struct BlockTQ2_0 { uint8_t qs[64]; uint16_t d; };
struct BlockIQ1_S { uint16_t d; uint8_t qs[32]; uint16_t qh[8]; };  // qh: 4 x 3 bits of index, 3 of scale, a sign
struct BlockIQ1_M { uint8_t qs[32]; uint8_t qh[16]; uint16_t scales[4]; };  // scales: 4 x 3 bits, 4 bits of d
struct BlockIQ2_XXS { uint16_t d; struct { uint8_t qs[4]; uint32_t signs; } blocks[8]; };  // signs: 4 x 7, scale: 4
struct BlockIQ2_XS { uint16_t d; uint16_t qs[32]; uint8_t scales[8]; };  // qs: 9 bits of index, 7 of signs
struct BlockIQ2_S { uint16_t d; uint8_t qs[32]; uint8_t signs[32]; uint8_t qh[8]; uint8_t scales[8]; };
struct BlockIQ3_XXS { uint16_t d; uint8_t qs[64]; uint32_t signs[8]; };
struct BlockIQ3_S { uint16_t d; uint8_t qs[64]; uint8_t qh[8]; uint8_t signs[32]; uint8_t scales[4]; };
struct BlockIQ4_NL { uint16_t d; uint8_t qs[16]; };
struct BlockIQ4_XS { uint16_t d, scales_h; uint8_t scales_l[4]; uint8_t qs[128]; };
struct BlockMXFP4 { uint8_t e; uint8_t qs[16]; };  // e: D is 2^(e - 128)
#pragma pack(pop)

static_assert(sizeof(BlockQ4_0) == 18 && sizeof(BlockQ4_1) == 20 && sizeof(BlockQ5_0) == 22);
static_assert(sizeof(BlockQ5_1) == 24 && sizeof(BlockQ8_0) == 34 && sizeof(BlockQ2_K) == 84);
static_assert(sizeof(BlockQ3_K) == 110 && sizeof(BlockQ4_K) == 144 && sizeof(BlockQ5_K) == 176);
static_assert(sizeof(BlockQ6_K) == 210 && sizeof(BlockTQ1_0) == 54 && sizeof(BlockTQ2_0) == 66);
static_assert(sizeof(BlockIQ1_S) == 50 && sizeof(BlockIQ1_M) == 56 && sizeof(BlockIQ2_XXS) == 66);
static_assert(sizeof(BlockIQ2_XS) == 74 && sizeof(BlockIQ2_S) == 82 && sizeof(BlockIQ3_XXS) == 98);
static_assert(sizeof(BlockIQ3_S) == 110 && sizeof(BlockIQ4_NL) == 18 && sizeof(BlockIQ4_XS) == 136);
static_assert(sizeof(BlockMXFP4) == 17);

// The scales of a block of 32 weights.
enum class Scales : uint8_t {
  kD,           // f16 d                                                w = d q
  kBF16D,       // bf16 d                                               w = d q
  kDM,          // f16 d, m                                             w = d q + m
  kSuperD,      // super-block: f16 d; block: i8 scale                  w = d scale q
  kSuper,       // super-block: f16 d, dmin; block: u8 scale, min       w = d scale q - dmin min
  kSuper16,     // super-block: f16 d; block: i8 scale[2]               w = d scale[k / 16] q
  kSuper16Min,  // super-block: f16 d, dmin; block: u4 scale[2], min[2] w = d scale[k / 16] q - dmin min[k / 16]
};

constexpr int kLookUp = -1;  // as a zero: codes are looked up in the type's codebook

// How codes give the q above: those of 8 bits are signed, others have `zero` taken off or are looked up.
struct CodeFormat {
  int bits;
  int zero;
  Scales scales;

  constexpr bool has_codebook() const { return zero == kLookUp; }
  constexpr bool is_signed() const { return bits == 8 || has_codebook(); }
  constexpr bool has_min() const {
    return scales == Scales::kDM || scales == Scales::kSuper || scales == Scales::kSuper16Min;
  }
  constexpr bool is_super() const { return scales >= Scales::kSuperD; }
  constexpr bool is_halved() const { return scales >= Scales::kSuper16; }  // sub-scales for 16 k, not 32
};

struct Codebook {
  int8_t values[16];
  float unit;  // a factor of d, a power of two
};

// Codes and scales of kSuper weights or of one block of 32, in logical k order.
struct Codes {
  uint8_t q[kSuper];     // unsigned codes; Q8_0: the bits of an int8
  uint16_t d, dmin;      // bits of f16 or bf16; dmin is M of Q4_1 and Q5_1
  int8_t scale[16];      // of each 16 weights (kSuperD, kSuper: of each 32, first 8 entries)
  uint8_t min[16];       // likewise
};

struct TypeInfo {
  GgmlType type;
  const char* name;
  int block_size;        // weights in one block of the file
  int block_bytes;
  CodeFormat format;
  void (*decode)(const uint8_t* block, Codes& codes);  // null for the float types
  const Codebook* codebook;                            // where the format has one
};

// The row of the table for a ggml type id, or null when the type is not supported.
const TypeInfo* find_type(uint32_t type);

// Decodes n weights of one row to floats; n is a multiple of the type's block size.
void dequantize_row(const TypeInfo& type, const uint8_t* src, float* dst, int64_t n);

// Whether n weights, or the scales of their blocks, are finite numbers.
bool all_finite(const TypeInfo& type, const uint8_t* src, int64_t n);

}  // namespace rvllm
