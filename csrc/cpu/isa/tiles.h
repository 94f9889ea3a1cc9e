// AMX's eight tile registers: 0-3 hold sums of 16 rows x 16 columns, 4 and 5 rows of int8, 6 and 7 codes as unsigned
// bytes. RVLLM_EMULATED_ISAS makes them arrays, for tests on other processors. Included inside an anonymous namespace.

constexpr int kTileRows = 16;

// 64 bytes, as ldtilecfg reads them.
struct TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64, "ldtilecfg reads 64 bytes");

#ifdef RVLLM_EMULATED_ISAS

struct EmulatedTiles {
  TileShapes shapes;
  alignas(64) uint8_t bytes[8][16][64];
};
thread_local EmulatedTiles emulated_tiles;

inline void load_shapes(const TileShapes& shapes) {
  emulated_tiles.shapes = shapes;
  memset(emulated_tiles.bytes, 0, sizeof(emulated_tiles.bytes));
}

inline void release_tiles() { emulated_tiles.shapes = {}; }

template <int T>
inline void tile_load(const void* p, int64_t stride) {
  const EmulatedTiles& e = emulated_tiles;
  for (int r = 0; r < e.shapes.rows[T]; ++r)
    memcpy(emulated_tiles.bytes[T][r], (const uint8_t*)p + r * stride, e.shapes.row_bytes[T]);
}

template <int T>
inline void tile_store(void* p, int64_t stride) {
  const EmulatedTiles& e = emulated_tiles;
  for (int r = 0; r < e.shapes.rows[T]; ++r) memcpy((uint8_t*)p + r * stride, e.bytes[T][r], e.shapes.row_bytes[T]);
}

template <int T>
inline void tile_zero() {
  memset(emulated_tiles.bytes[T], 0, sizeof(emulated_tiles.bytes[T]));
}

template <int C, int A, int B>
inline void tile_dot() {
  EmulatedTiles& e = emulated_tiles;
  for (int r = 0; r < e.shapes.rows[C]; ++r)
    for (int c = 0; c < e.shapes.row_bytes[C] / 4; ++c) {
      int32_t sum;
      memcpy(&sum, e.bytes[C][r] + 4 * c, 4);
      for (int k = 0; k < e.shapes.row_bytes[A]; ++k)
        sum += int(int8_t(e.bytes[A][r][k])) * int(e.bytes[B][k / 4][4 * c + k % 4]);
      memcpy(e.bytes[C][r] + 4 * c, &sum, 4);
    }
}

#else

// As assembly, because compilers' intrinsics take no template parameter as a tile, and gcc's tell it of a part of the
// shapes only, whose other stores it then drops.
inline void load_shapes(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }

inline void release_tiles() { asm volatile("tilerelease"); }

template <int T>
inline void tile_load(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "n"(T) : "memory");
}

template <int T>
inline void tile_store(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "n"(T) : "memory");
}

template <int T>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"n"(T));
}

// C[r, c] += sum over k of A[r, k] (signed) * B[k, c] (unsigned)
template <int C, int A, int B>
inline void tile_dot() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(C), "n"(A), "n"(B));
}

#endif

// Shapes of dot products over `depth` k. release_tiles comes after them: tiles in use make a thread's switches dearer.
inline void use_tiles(int depth) {
  TileShapes shapes;
  for (int t = 0; t < 8; ++t) {
    shapes.rows[t] = uint8_t(t < 6 ? kTileRows : depth / 4);
    shapes.row_bytes[t] = uint16_t(t == 4 || t == 5 ? depth : 64);
  }
  load_shapes(shapes);
}
