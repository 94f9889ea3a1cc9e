// out = x W^T + bias for quantized weights, on the integer units of the tensor cores. Included by the files that make
// the kernels of some formats each: here is which of them a product takes.
#include "cuda/few_tokens.h"
#include "cuda/many_tokens.h"

namespace rvllm::cuda {
namespace {

template <class F, int kTiles, int kUnit>
void launch_few(QuantizedLinearArgs args, int warps, int num_processors, cudaStream_t stream) {
  const int groups = (args.token_tiles + kTiles - 1) / kTiles;
  args.groups_a_block = args.experts.tile_expert ? 1 : groups < 4 ? groups : 4;
  while (args.groups_a_block * warps > 8) warps /= 2;
  // With all of K in one warp, blocks are made of tiles instead, as long as there are enough of these.
  args.tiles_a_block = 1;
  while (warps * args.groups_a_block * args.tiles_a_block < 4 &&
         args.row_tiles / args.tiles_a_block > 2 * num_processors)
    args.tiles_a_block *= 2;
  const dim3 grid(unsigned((args.row_tiles + args.tiles_a_block - 1) / args.tiles_a_block),
                  unsigned((groups + args.groups_a_block - 1) / args.groups_a_block));
  const dim3 block(32, unsigned(warps), unsigned(args.tiles_a_block * args.groups_a_block));
  const size_t shared = warps > 1 ? block.z * kTiles * 32 * sizeof(float4) : 0;
  rv::launch(few_tokens_kernel<F, kTiles, kUnit>, grid, block, shared, stream, args);
}

template <class F, int kTiles>
void launch_many(const QuantizedLinearArgs& args, cudaStream_t stream) {
  using Shared = ManyTokensShared<F, kTiles>;
  static_assert(sizeof(Shared) <= 48 << 10, "more must be asked for");
  const dim3 grid(unsigned((args.row_tiles + kTiles - 1) / kTiles),
                  unsigned((args.token_tiles + Shared::kTokenTiles - 1) / Shared::kTokenTiles));
  rv::launch(many_tokens_kernel<F, kTiles>, grid, dim3(32, kManyTokensThreads / 32), sizeof(Shared), stream, args);
}

}  // namespace

template <class F>
void quantized_linear_of(const QuantizedLinearArgs& of_any, int warps, int num_processors, cudaStream_t stream) {
  QuantizedLinearArgs args = of_any;
  args.layout = tile_layout<F>(int64_t(args.blocks) * 32);
  if (args.token_tiles == 1 || args.experts.tile_expert)
    return launch_few<F, 1, 8>(args, warps, num_processors, stream);
  // Warps that would have outputs; a processor has four schedulers.
  const auto warps_of = [&](int tiles) {
    return int64_t((args.row_tiles + 1) / 2) * ((args.token_tiles + tiles - 1) / tiles);
  };
  constexpr int kTiles = F::kHalved && F::kHasMin ? 4 : 8;  // as registers allow
  if (args.token_tiles > 2 && warps_of(kTiles) >= 4 * num_processors) return launch_many<F, kTiles>(args, stream);
  if (args.token_tiles > 2 && warps_of(2) >= 2 * num_processors) return launch_many<F, 2>(args, stream);
  launch_few<F, 2, 4>(args, warps, num_processors, stream);
}

}  // namespace rvllm::cuda
