#include "cuda/kernels.h"
#include "cuda/rows.h"

namespace rvllm::cuda {
namespace {

// A warp makes blocks of 32 k of one row, lane k element k. grid: [rows, parts of the row].
template <class Row>
__global__ void __launch_bounds__(256) quantize_kernel(Row row, QuantizedRows out, int k, const int* places) {
  const int token = places ? places[blockIdx.x] : int(blockIdx.x);
  row.prepare(int(blockIdx.x), k);
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32, blocks = k / 32;
  const int step = gridDim.y * warps;
  for (int block = blockIdx.y * warps + threadIdx.x / 32; block < blocks; block += step) {
    const float x = row.at(32 * block + lane);
    // As integers, magnitudes are in order and NaN is above all.
    const float largest = __int_as_float(warp_max(__float_as_int(x) & 0x7fffffff));
    const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;  // never infinite
    const float rounded = rintf(x * inverse);
    const float raised = rounded > -127.0f ? rounded : -127.0f;  // NaN has no integer: the scale passes it on
    const int code = int(raised < 127.0f ? raised : 127.0f);
    int sum = code;
    for (int span = 8; span > 0; span /= 2) sum += __shfl_xor_sync(kFullWarp, sum, span);
    const int other = __shfl_xor_sync(kFullWarp, sum, 16);
    const int tile = token / 8, g = token % 8;
    const int64_t place = out.place(tile, block);
    uint8_t* const codes = reinterpret_cast<uint8_t*>(out.q + place / 2 * 32 + g * 4 + lane % 16 / 4);
    codes[tile % 2 * 8 + lane / 16 * 4 + lane % 4] = uint8_t(code);
    if (lane == 0) {
      const int64_t first = place * 4;
      const float scale = largest <= 3.40282347e38f ? largest / 127.0f : not_a_number();
      float* const scales = reinterpret_cast<float*>(out.scale + first + g / 2) + g % 2;
      scales[0] = scale;
      scales[2] = scale * float(sum + other);
      reinterpret_cast<int2*>(out.half_sum + first)[g] = make_int2(sum, other);
    }
  }
}

template <class Row>
void launch_rows(const Row& row, const QuantizedRows& out, int rows, int k, const int* places, unsigned parts,
                 cudaStream_t stream) {
  rv::launch(quantize_kernel<Row>, dim3(unsigned(rows), parts), 256, 0, stream, row, out, k, places);
}

}  // namespace

void quantize(Tensor x, int rows, int per_source, const QuantizedRows& out, const int* places, cudaStream_t stream) {
  const int k = int(x.cols);
  launch_rows(PlainRow{x.data, x.stride, per_source}, out, rows, k, places, unsigned((k + 1023) / 1024), stream);
}

void quantize_norm(const NormRow& row, const QuantizedRows& out, int rows, int k, cudaStream_t stream) {
  launch_rows(row, out, rows, k, nullptr, 1, stream);
}

void quantize_activated(Tensor x, Activation activation, const QuantizedRows& out, int k, const int* places,
                        cudaStream_t stream) {
  with_activation(activation, x.data, x.stride, k, [&](auto row) {
    launch_rows(row, out, int(x.rows), k, places, unsigned((k + 1023) / 1024), stream);
  });
}

}  // namespace rvllm::cuda
