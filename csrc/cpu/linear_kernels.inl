// Matrix multiplication by packed weights, written once over Vec. Included inside an anonymous namespace.
//
// Quantized: for each output, over blocks of 32 k in ascending order, with s the activation scale of the block,
//   sum = fma(I, D * s, sum), I = dot of codes less zero * sum of q (times sub-scales of 16 k, where there are any)
//   sum = fma(M, s * J, sum) for formats with minima, J = sum of q (times sub-minima of 16 k)
// I and J are exact integers. Float weights: sum = fma(w, x, sum) over ascending k.

// Group g of the codes of a block, from packed form.
template <int Bits>
inline Bytes unpack_group(const uint8_t* p, int g) {
  if (Bits == 8) return offset(bload(p + 64 * g));
  if (Bits >= 4) {
    const Bytes low = field(bload(p + 64 * (g % 4)), g / 4 * 4, 4, 0);
    if (Bits == 5) return bor(low, field(bload(p + 256), g, 1, 4));
    if (Bits == 6) return bor(low, field(bload(p + 256 + 64 * (g / 4)), 2 * (g % 4), 2, 4));
    return low;
  }
  const Bytes low = field(bload(p + 64 * (g / 4)), 2 * (g % 4), 2, 0);
  return Bits == 3 ? bor(low, field(bload(p + 128), g, 1, 2)) : low;
}

// What a chunk has in common: the scales of a super-block and the table of its codes.
struct ChunkHeader {
  Vec d, dmin;
  Bytes values;
};

template <int Type>
inline ChunkHeader load_header(const uint8_t* p, const Codebook* codebook) {
  constexpr PackedFormat f = kFormats[Type];
  ChunkHeader h{};
  if (f.has_codebook()) h.values = offset(load_table((const uint8_t*)codebook->values));
  if (f.is_super()) {
    h.d = load_f16((const uint16_t*)p);
    if (f.has_codebook()) h.d = mul(h.d, set1(codebook->unit));
    if (f.has_min()) h.dmin = mul(load_f16((const uint16_t*)p + kTileCols), set1(-1.0f));
  }
  return h;
}

// The scales of a block for the 16 columns of a tile.
struct BlockScales {
  Vec d, m;                 // D: d, or d x sub-scale where that is for 32 k; M: m, -dmin x sub-minimum, or -dmin
  IVec scale[2], min[2];    // sub-scales and sub-minima for 16 k
};

template <int Type>
inline BlockScales load_scales(const uint8_t* block, const ChunkHeader& h) {
  constexpr PackedFormat f = kFormats[Type];
  const uint8_t* const p = block + f.code_bytes();
  BlockScales s{};
  if constexpr (!f.is_super()) {
    s.d = f.scales == Scales::kBF16D ? load_bf16((const uint16_t*)p) : load_f16((const uint16_t*)p);
    if (f.has_min()) s.m = load_f16((const uint16_t*)p + kTileCols);
  } else if constexpr (!f.is_halved()) {  // bytes below 128, or signed
    s.d = mul(h.d, to_float(iload_i8((const int8_t*)p)));
    if (f.has_min()) s.m = mul(h.dmin, to_float(iload_i8((const int8_t*)p + kTileCols)));
  } else {
    s.d = h.d;
    s.m = h.dmin;
    for (int half = 0; half < 2; ++half) {
      const IVec bytes = iload_i8((const int8_t*)p + kTileCols * half);
      s.scale[half] = f.has_min() ? iand(bytes, iset1(15)) : bytes;
      if (f.has_min()) s.min[half] = iand(ishift_right(bytes, 4), iset1(15));
    }
  }
  return s;
}

// Blocks of one tile as they lie in memory.
template <int Type>
struct PackedBlocks {
  static constexpr PackedFormat f = kFormats[Type];
  const uint8_t* p;  // of the first block
  ChunkHeader header;

  PackedBlocks(const uint8_t* chunk, const Codebook* codebook)
      : p(chunk + f.header_bytes()), header(load_header<Type>(chunk, codebook)) {}

  Bytes group(int b, int g) const {
    const Bytes codes = unpack_group<f.bits>(p + b * f.block_bytes(), g);
    return f.has_codebook() ? look_up(header.values, codes) : codes;
  }
  BlockScales scales(int b) const { return load_scales<Type>(p + b * f.block_bytes(), header); }
};

// The same, unpacked, where many rows are to read them.
template <int Type>
struct UnpackedBlocks {
  static constexpr PackedFormat f = kFormats[Type];
  const UnpackedChunk& u;

  Bytes group(int b, int g) const { return bload(u.codes[b] + 64 * g); }
  BlockScales scales(int b) const {
    BlockScales s{};
    s.d = load(u.d[b]);
    if (f.has_min()) s.m = load(u.m[b]);
    for (int half = 0; half < 2 && f.is_halved(); ++half) {
      s.scale[half] = iload(u.scale[b][half]);
      if (f.has_min()) s.min[half] = iload(u.min[b][half]);
    }
    return s;
  }
};

// Unpacks `blocks` blocks of one tile from `p`, the start of a chunk: a super-block, or as many blocks as fit.
template <int Type>
void unpack(const uint8_t* p, int blocks, const Codebook* codebook, UnpackedChunk& u) {
  constexpr PackedFormat f = kFormats[Type];
  const PackedBlocks<Type> packed(p, codebook);
  for (int b = 0; b < blocks; ++b) {
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g) bstore(u.codes[b] + 64 * g, packed.group(b, g));
    const BlockScales s = packed.scales(b);
    store(u.d[b], s.d);
    if (f.has_min()) store(u.m[b], s.m);
    for (int half = 0; half < 2 && f.is_halved(); ++half) {
      istore(u.scale[b][half], s.scale[half]);
      if (f.has_min()) istore(u.min[b][half], s.min[half]);
    }
  }
}

// The sum of one row of a tile after a block: low and high are dot products with its codes over all 32 k, or over the
// first and the last 16 of a halved format. i: block and row in xq.
template <int Type>
inline Vec accumulate(const BlockScales& s, IVec low, IVec high, const QuantizedRows& x, int64_t i, Vec sum) {
  constexpr PackedFormat f = kFormats[Type];
  constexpr int kZero = f.is_signed() ? kByteOffset : f.zero;
  constexpr int kZeroBits = kZero ? __builtin_ctz(kZero) : 0;
  static_assert(kZero == 0 || kZero == 1 << kZeroBits, "a multiplication before the broadcast would be slower");
  const Vec d = mul(s.d, set1(x.scale[i]));
  if constexpr (!f.is_halved()) {
    if (kZero) low = isub(low, ishift_left(iset1(x.sum[i]), kZeroBits));
    sum = fma(to_float(low), d, sum);
    if (f.has_min()) sum = fma(s.m, set1(x.scaled_sum[i]), sum);
  } else {
    const int32_t* half = x.half_sum + 2 * i;
    if (kZero) {
      low = isub(low, ishift_left(iset1(half[0]), kZeroBits));
      high = isub(high, ishift_left(iset1(half[1]), kZeroBits));
    }
    const IVec dot = iadd(imul(s.scale[0], low), imul(s.scale[1], high));
    sum = fma(to_float(dot), d, sum);
    if (f.has_min()) {
      const IVec j = iadd(imul(s.min[0], iset1(half[0])), imul(s.min[1], iset1(half[1])));
      sum = fma(s.m, mul(to_float(j), set1(x.scale[i])), sum);
    }
  }
  return sum;
}

// sums[r] += blocks [first, first + blocks) of row `row` + r, for R rows.
template <int Type, int R, class Blocks>
void multiply(const Blocks& tile, int first, int blocks, const LinearArgs& args, int row, float* sums) {
  constexpr PackedFormat f = kFormats[Type];
  constexpr int kBits = f.is_signed() ? 8 : f.bits;
  constexpr int kDotGroups = f.is_halved() ? kGroups / 2 : kGroups;
  Vec sum[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sum[r] = load(sums + r * kTileCols);
  for (int b = 0; b < blocks; ++b) {
    const int64_t at = args.xq.at(first + b, row);
    const int8_t* a = args.xq.q + 32 * at;
    const auto dot = [&](int group0, IVec* out) {
      dot_rows<kBits, kDotGroups, R>([&](int g) { return tile.group(b, group0 + g); }, a + 4 * group0, out);
    };
    IVec low[R], high[R];
    dot(0, low);
    if (f.is_halved()) dot(kDotGroups, high);
    const BlockScales scales = tile.scales(b);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      sum[r] = accumulate<Type>(scales, low[r], f.is_halved() ? high[r] : low[r], args.xq, at + r, sum[r]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store(sums + r * kTileCols, sum[r]);
}

// The same for rows [r, rows), at most R at a time, with r a row of `sums`.
template <int Type, int R, class Blocks>
inline void multiply_rest(const Blocks& tile, int first, int blocks, const LinearArgs& args, int row0, int r, int rows,
                          float* sums) {
  for (; r + R <= rows; r += R) multiply<Type, R>(tile, first, blocks, args, row0 + r, sums + r * kTileCols);
  if constexpr (R > 1) multiply_rest<Type, R / 2>(tile, first, blocks, args, row0, r, rows, sums);
}

// Writes the finished sums of `rows` rows of a tile, with the bias.
inline void finish_tile(const LinearArgs& args, int tile, int row, int rows, const float* sums) {
  const int n0 = tile * kTileCols;
  const int cols = args.n - n0 < kTileCols ? args.n - n0 : kTileCols;
  for (int r = 0; r < rows; ++r) {
    float* const out = args.out + (row + r) * args.out_stride + n0;
    const float* const y = sums + r * kTileCols;
    if (cols == kTileCols) {
      store(out, args.bias ? add(load(y), load(args.bias + n0)) : load(y));
      continue;
    }
    for (int c = 0; c < cols; ++c) out[c] = args.bias ? y[c] + args.bias[n0 + c] : y[c];
  }
}

constexpr int kPrefetchRows = 3;  // from which on a chunk is worked on for longer than the processor itself looks ahead

inline void prefetch(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }  // into the second-level cache

// multiply_tiles multiplies as many of the first rows as it likes and returns their number.
template <int Type, int DirectRows, class MultiplyTiles>
void linear_quantized(const LinearArgs& args, int begin, int end, const MultiplyTiles& multiply_tiles) {
  constexpr PackedFormat f = kFormats[Type];
  constexpr int kChunkBytes = kMaxChunk / f.chunk_blocks() * f.chunk_bytes();
  const int row_blocks = args.k / 32;
  alignas(64) UnpackedChunk chunk;
  alignas(64) float sums[kRowBlock * kTileCols];
  for (int tile = begin; tile < end; ++tile) {
    for (int row0 = 0; row0 < args.rows; row0 += kRowBlock) {
      const int rows = args.rows - row0 < kRowBlock ? args.rows - row0 : kRowBlock;
      for (int i = 0; i < rows * kTileCols; ++i) sums[i] = 0.0f;
      const uint8_t* p = args.weight + tile * args.tile_bytes;
      for (int first = 0; first < row_blocks; first += kMaxChunk, p += kChunkBytes) {
        const int blocks = row_blocks - first < kMaxChunk ? row_blocks - first : kMaxChunk;
        for (int i = 0; i < kChunkBytes && rows >= kPrefetchRows; i += 64) prefetch(p + 2 * kChunkBytes + i);
        int r = 0;
        if (DirectRows < kRowBlock && rows > DirectRows) {
          unpack<Type>(p, blocks, args.codebook, chunk);
          r = multiply_tiles(chunk, first, blocks, args, row0, rows, sums);
          for (; r + kRows <= rows; r += kRows)
            multiply<Type, kRows>(UnpackedBlocks<Type>{chunk}, first, blocks, args, row0 + r, sums + r * kTileCols);
        }
        multiply_rest<Type, kRows>(PackedBlocks<Type>(p, args.codebook), first, blocks, args, row0, r, rows, sums);
      }
      finish_tile(args, tile, row0, rows, sums);
    }
  }
}

template <int Type>
void linear_quantized(const LinearArgs& args, int begin, int end) {
  linear_quantized<Type, kDirectRows>(args, begin, end, [](auto&&...) { return 0; });
}

inline void dot_products(const uint8_t* codes, const int8_t* x, float* out) {
  for (int row = 0; row < kRowBlock; row += kRows) {
    IVec sum[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sum[r] = iset1(0);
    for (int b = 0; b < kMaxChunk; ++b) {
      IVec dot[kRows];
      const auto group = [&](int g) { return bload(codes + b * kTileCodes + 64 * g); };
      dot_rows<4, kGroups, kRows>(group, x + 32 * (b * kRowBlock + row), dot);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sum[r] = iadd(sum[r], dot[r]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) store(out + (row + r) * kTileCols, to_float(sum[r]));
  }
}

template <int Type>
inline Vec load_weights(const uint8_t* p, int k) {
  if (Type == int(PackedType::F32)) return load((const float*)p + k * kTileCols);
  if (Type == int(PackedType::F16)) return load_f16((const uint16_t*)p + k * kTileCols);
  return load_bf16((const uint16_t*)p + k * kTileCols);
}

template <int Type, int R>
inline void multiply_float(const LinearArgs& args, const uint8_t* p, int tile, int row) {
  const float* x = args.x + row * args.x_stride;
  Vec sum[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sum[r] = set1(0.0f);
  for (int k = 0; k < args.k; ++k) {
    const Vec w = load_weights<Type>(p, k);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum[r] = fma(w, set1(x[r * args.x_stride + k]), sum[r]);
  }
  float sums[R * kTileCols];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store(sums + r * kTileCols, sum[r]);
  finish_tile(args, tile, row, R, sums);
}

template <int Type>
void linear_float(const LinearArgs& args, int begin, int end) {
  for (int tile = begin; tile < end; ++tile) {
    const uint8_t* p = args.weight + tile * args.tile_bytes;
    int r = 0;
    for (; r + 4 <= args.rows; r += 4) multiply_float<Type, 4>(args, p, tile, r);
    for (; r + 2 <= args.rows; r += 2) multiply_float<Type, 2>(args, p, tile, r);
    for (; r < args.rows; ++r) multiply_float<Type, 1>(args, p, tile, r);
  }
}

// Each weight is rounded as in dequantizing the file's row.
template <int Type>
void unpack_row(const UnpackRowArgs& args, float* out) {
  constexpr PackedFormat f = kFormats[Type];
  alignas(64) UnpackedChunk u;
  const uint8_t* p = args.tile;
  for (int k = 0; k < args.k;) {
    if (Type < int(PackedType::kFirstQuantized)) {
      store(u.d[0], load_weights<Type>(p, k));
      out[k++] = u.d[0][args.column];
      continue;
    }
    const int left = (args.k - k) / 32, blocks = left < kMaxChunk ? left : kMaxChunk;
    unpack<Type>(p, blocks, args.codebook, u);
    p += f.is_super() ? f.chunk_bytes() : blocks * f.chunk_bytes();
    for (int b = 0; b < blocks; ++b)
      for (int i = 0; i < 32; ++i, ++k) {
        const uint8_t code = u.codes[b][64 * (i / 4) + 4 * args.column + i % 4];
        const float q = float(f.is_signed() ? int(int8_t(code - kByteOffset)) : int(code) - f.zero);
        const float d = u.d[b][args.column];
        out[k] = f.is_halved() ? d * float(u.scale[b][i / 16][args.column]) * q : d * q;
        if (!f.has_min()) continue;
        const float m = u.m[b][args.column];
        out[k] += f.is_halved() ? m * float(u.min[b][i / 16][args.column]) : m;
      }
  }
}

inline void quantize_rows(const float* x, int64_t x_stride, int k, const QuantizedRows& out, int begin, int end) {
  const int row_blocks = k / 32;
  for (int t = begin; t < end; ++t) {
    for (int b = 0; b < row_blocks; ++b) {
      const float* p = x + t * x_stride + 32 * b;
      const Vec low = load(p), high = load(p + 16);
      const float largest = reduce_max_abs(low, high);
      const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;  // never infinite
      const int64_t at = out.at(b, t);
      int8_t* const q = out.q + 32 * at;
      // The bounds only matter for infinities and NaN, which have no integer: the scale passes them on.
      const auto codes = [&](Vec v) { return min(max(round(mul(v, set1(inverse))), set1(-127.0f)), set1(127.0f)); };
      const Vec low_codes = codes(low), high_codes = codes(high);
      store_i8(q, low_codes);
      store_i8(q + 16, high_codes);
      const int32_t sum[2] = {int32_t(reduce_add(low_codes)), int32_t(reduce_add(high_codes))};  // exact
      out.scale[at] = largest <= 3.40282347e38f ? largest / 127.0f : __builtin_nanf("");
      out.sum[at] = sum[0] + sum[1];
      out.half_sum[2 * at] = sum[0];
      out.half_sum[2 * at + 1] = sum[1];
      out.scaled_sum[at] = out.scale[at] * float(out.sum[at]);
    }
  }
}
