#include "cuda/quantized_linear.h"

namespace rvllm::cuda {

void quantized_linear(const DeviceMatrix& w, const QuantizedRows& x, int tokens, const ExpertRows& experts,
                      const float* bias, float* out, int64_t out_stride, const Residual& residual, int num_processors,
                      cudaStream_t stream) {
  QuantizedLinearArgs args{};
  args.weight = w.data;
  args.codebook = w.codebook;
  args.unit = w.unit;
  args.rows = int(w.rows);
  args.row_tiles = int((w.rows + kTileRows - 1) / kTileRows);
  args.blocks = int(w.cols / 32);
  args.x = x;
  args.tokens = tokens;
  args.token_tiles = experts.tile_expert ? experts.num_tiles : (tokens + 7) / 8;
  args.experts = experts;
  args.expert_bytes = w.expert_bytes;
  args.bias = bias;
  args.out = out;
  args.out_stride = out_stride;
  args.residual = residual;
  // Enough warps to have 16 reads under way on every processor.
  const int groups = args.token_tiles <= 2 ? 1 : (args.token_tiles + 1) / 2;
  int warps = 1;
  while (warps < 8 && int64_t(args.row_tiles) * groups * warps < 16 * num_processors) warps *= 2;
  with_format(w.format, [&](auto format) {
    quantized_linear_of<decltype(format)>(args, warps, num_processors, stream);
  });
}

}  // namespace rvllm::cuda
