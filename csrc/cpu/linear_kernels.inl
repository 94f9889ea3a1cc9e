// Matrix multiplication by packed weights, written once over Vec. Included inside an anonymous namespace.
//
// Quantized: for each output, over blocks of 32 k in ascending order, with s the activation scale of the block,
//   sum = fma(I, D * s, sum), I = dot of codes less zero * sum of q (times sub-scales of 16 k, where there are any)
//   sum = fma(M, s * J, sum) for formats with minima, J = sum of q (times sub-minima of 16 k)
// I and J are exact integers. Float weights: sum = fma(w, x, sum) over ascending k.

inline void unpack_codes(int bits, const uint8_t* __restrict p, uint8_t* __restrict out) {
  if (bits == 8) {
    for (int i = 0; i < kTileCodes; ++i) out[i] = uint8_t(p[i] + kByteOffset);
  } else if (bits >= 4) {
    for (int i = 0; i < 256; ++i) out[i] = p[i] & 15;
    for (int i = 0; i < 256; ++i) out[256 + i] = p[i] >> 4;
    p += 256;
    if (bits == 5)
      for (int g = 0; g < kGroups; ++g)
        for (int i = 0; i < 64; ++i) out[64 * g + i] = uint8_t(out[64 * g + i] | (p[i] >> g & 1) << 4);
    if (bits == 6)
      for (int g = 0; g < kGroups; ++g)
        for (int i = 0; i < 64; ++i)
          out[64 * g + i] = uint8_t(out[64 * g + i] | (p[64 * (g / 4) + i] >> 2 * (g % 4) & 3) << 4);
  } else {
    for (int g = 0; g < kGroups; ++g)
      for (int i = 0; i < 64; ++i) out[64 * g + i] = p[64 * (g / 4) + i] >> 2 * (g % 4) & 3;
    p += 128;
    if (bits == 3)
      for (int g = 0; g < kGroups; ++g)
        for (int i = 0; i < 64; ++i) out[64 * g + i] = uint8_t(out[64 * g + i] | (p[i] >> g & 1) << 2);
  }
}

// Unpacks `blocks` blocks of one tile from `p`, the start of a chunk: a super-block, or as many blocks as fit.
template <int Type>
void unpack(const uint8_t* p, int blocks, const Codebook* codebook, UnpackedChunk& u) {
  constexpr PackedFormat f = kFormats[Type];
  const uint16_t* header = (const uint16_t*)p;
  float d[kTileCols], dmin[kTileCols];
  uint8_t values[16];
  if (f.has_codebook())
    for (int i = 0; i < 16; ++i) values[i] = uint8_t(codebook->values[i] + kByteOffset);
  if (f.is_super()) {
    store(d, f.has_codebook() ? mul(load_f16(header), set1(codebook->unit)) : load_f16(header));
    if (f.has_min()) store(dmin, load_f16(header + kTileCols));
    p += f.header_bytes();
  }
  for (int b = 0; b < blocks; ++b, p += f.block_bytes()) {
    unpack_codes(f.bits, p, u.codes[b]);
    if (f.has_codebook())
      for (int g = 0; g < kGroups; ++g) look_up(values, u.codes[b] + 64 * g);
    if (!f.is_super()) {
      const uint16_t* s = (const uint16_t*)(p + f.code_bytes());
      store(u.d[b], f.scales == Scales::kBF16D ? load_bf16(s) : load_f16(s));
      if (f.has_min()) store(u.m[b], load_f16(s + kTileCols));
      continue;
    }
    const uint8_t* packed = p + f.code_bytes();
    if (f.scales == Scales::kSuper || f.scales == Scales::kSuperD) {  // bytes below 128, or signed
      store(u.d[b], mul(load(d), load_i8((const int8_t*)packed)));
      if (f.has_min()) store(u.m[b], mul(load(dmin), mul(load_i8((const int8_t*)packed + kTileCols), set1(-1.0f))));
      continue;
    }
    store(u.d[b], load(d));
    if (f.has_min()) store(u.m[b], mul(load(dmin), set1(-1.0f)));
    uint8_t s[2 * kTileCols];  // a copy, which the stores cannot change
    __builtin_memcpy(s, packed, sizeof(s));
    for (int half = 0; half < 2; ++half)
      for (int c = 0; c < kTileCols; ++c) {
        const uint8_t byte = s[kTileCols * half + c];
        u.scale[b][half][c] = f.has_min() ? byte & 15 : int8_t(byte);
        if (f.has_min()) u.min[b][half][c] = byte >> 4;
      }
  }
}

// The sum of one row of a tile after block b of the chunk: low and high are dot products with its codes over all 32 k,
// or over the first and the last 16 of a halved format. i: row and block in xq.
template <int Type>
inline Vec accumulate(const UnpackedChunk& u, int b, IVec low, IVec high, const QuantizedRows& x, int64_t i, Vec sum) {
  constexpr PackedFormat f = kFormats[Type];
  constexpr int kZero = f.is_signed() ? kByteOffset : f.zero;
  const Vec d = mul(load(u.d[b]), set1(x.scale[i]));
  if constexpr (!f.is_halved()) {
    if (kZero) low = isub(low, iset1(kZero * x.sum[i]));
    sum = fma(to_float(low), d, sum);
    if (f.has_min()) sum = fma(load(u.m[b]), set1(x.scaled_sum[i]), sum);
  } else {
    const int32_t* half = x.half_sum + 2 * i;
    if (kZero) {
      low = isub(low, iset1(kZero * half[0]));
      high = isub(high, iset1(kZero * half[1]));
    }
    const IVec dot = iadd(imul(iload(u.scale[b][0]), low), imul(iload(u.scale[b][1]), high));
    sum = fma(to_float(dot), d, sum);
    if (f.has_min()) {
      const IVec j = iadd(imul(iload(u.min[b][0]), iset1(half[0])), imul(iload(u.min[b][1]), iset1(half[1])));
      sum = fma(load(u.m[b]), mul(to_float(j), set1(x.scale[i])), sum);
    }
  }
  return sum;
}

// sums[r] += blocks [first, first + blocks) of row `row` + r, for R rows.
template <int Type, int R>
void multiply(const UnpackedChunk& u, int first, int blocks, const LinearArgs& args, int row, float* sums) {
  constexpr PackedFormat f = kFormats[Type];
  constexpr int kBits = f.is_signed() ? 8 : f.bits;
  constexpr int kDotGroups = f.is_halved() ? kGroups / 2 : kGroups;
  const int64_t row_blocks = args.k / 32;
  Vec sum[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sum[r] = load(sums + r * kTileCols);
  for (int b = 0; b < blocks; ++b) {
    const int8_t* a = args.xq.q + int64_t(row) * args.k + 32 * (first + b);
    IVec low[R], high[R];
    dot_rows<kBits, kDotGroups, R>(u.codes[b], a, args.k, low);
    if constexpr (f.is_halved()) dot_rows<kBits, kDotGroups, R>(u.codes[b] + kTileCodes / 2, a + 16, args.k, high);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      sum[r] = accumulate<Type>(u, b, low[r], f.is_halved() ? high[r] : low[r], args.xq,
                                (row + r) * row_blocks + first + b, sum[r]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store(sums + r * kTileCols, sum[r]);
}

// Writes the finished sums of `rows` rows of a tile, with the bias.
inline void finish_tile(const LinearArgs& args, int tile, int row, int rows, const float* sums) {
  const int n0 = tile * kTileCols;
  const int cols = args.n - n0 < kTileCols ? args.n - n0 : kTileCols;
  for (int r = 0; r < rows; ++r) {
    float* out = args.out + (row + r) * args.out_stride + n0;
    for (int c = 0; c < cols; ++c) {
      const float y = sums[r * kTileCols + c];
      out[c] = args.bias ? y + args.bias[n0 + c] : y;
    }
  }
}

// multiply_tiles multiplies as many of the first rows as it likes and returns their number.
template <int Type, class MultiplyTiles>
void linear_quantized(const LinearArgs& args, int begin, int end, const MultiplyTiles& multiply_tiles) {
  constexpr PackedFormat f = kFormats[Type];
  const int row_blocks = args.k / 32;
  alignas(64) UnpackedChunk chunk;
  alignas(64) float sums[kRowBlock * kTileCols];
  for (int tile = begin; tile < end; ++tile) {
    for (int row0 = 0; row0 < args.rows; row0 += kRowBlock) {
      const int rows = args.rows - row0 < kRowBlock ? args.rows - row0 : kRowBlock;
      for (int i = 0; i < rows * kTileCols; ++i) sums[i] = 0.0f;
      const uint8_t* p = args.weight + tile * args.tile_bytes;
      for (int first = 0; first < row_blocks; first += kMaxChunk) {
        const int blocks = row_blocks - first < kMaxChunk ? row_blocks - first : kMaxChunk;
        unpack<Type>(p, blocks, args.codebook, chunk);
        p += f.is_super() ? f.chunk_bytes() : kMaxChunk * f.chunk_bytes();
        int r = multiply_tiles(chunk, first, blocks, args, row0, rows, sums);
        for (; r + kRows <= rows; r += kRows)
          multiply<Type, kRows>(chunk, first, blocks, args, row0 + r, sums + r * kTileCols);
        for (; r + 2 <= rows; r += 2) multiply<Type, 2>(chunk, first, blocks, args, row0 + r, sums + r * kTileCols);
        for (; r < rows; ++r) multiply<Type, 1>(chunk, first, blocks, args, row0 + r, sums + r * kTileCols);
      }
      finish_tile(args, tile, row0, rows, sums);
    }
  }
}

template <int Type>
void linear_quantized(const LinearArgs& args, int begin, int end) {
  linear_quantized<Type>(args, begin, end, [](auto&&...) { return 0; });
}

inline void dot_products(const uint8_t* codes, const int8_t* x, float* out) {
  constexpr int kIn = 32 * kMaxChunk;
  for (int row = 0; row < kRowBlock; row += kRows) {
    IVec sum[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sum[r] = iset1(0);
    for (int b = 0; b < kMaxChunk; ++b) {
      IVec dot[kRows];
      dot_rows<4, kGroups, kRows>(codes + b * kTileCodes, x + row * kIn + 32 * b, kIn, dot);
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
      int8_t* q = out.q + int64_t(t) * k + 32 * b;
      // The bounds only matter for infinities and NaN, which have no integer: the scale passes them on.
      const auto codes = [&](Vec v) { return min(max(round(mul(v, set1(inverse))), set1(-127.0f)), set1(127.0f)); };
      const Vec low_codes = codes(low), high_codes = codes(high);
      store_i8(q, low_codes);
      store_i8(q + 16, high_codes);
      const int32_t sum[2] = {int32_t(reduce_add(low_codes)), int32_t(reduce_add(high_codes))};  // exact
      const int64_t at = int64_t(t) * row_blocks + b;
      out.scale[at] = largest <= 3.40282347e38f ? largest / 127.0f : __builtin_nanf("");
      out.sum[at] = sum[0] + sum[1];
      out.half_sum[2 * at] = sum[0];
      out.half_sum[2 * at + 1] = sum[1];
      out.scaled_sum[at] = out.scale[at] * float(out.sum[at]);
    }
  }
}
