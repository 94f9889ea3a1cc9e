// One weight of a matrix of any type.
#pragma once

#include "cuda/kernels.h"
#include "cuda/unpack.h"

namespace rvllm::cuda {

template <class F>
struct QuantizedWeights {
  const uint8_t* tiles;
  TileLayout layout;
  uint4 codebook;
  float unit;

  explicit QuantizedWeights(const DeviceMatrix& w)
      : tiles(w.data), layout(tile_layout<F>(w.cols)), codebook(w.codebook), unit(w.unit) {}
  __device__ float at(int64_t row, int k) const {
    return weight_at<F>(tiles + row / kTileRows * layout.bytes, layout, codebook, unit, int(row % kTileRows), k);
  }
};

template <class T>
struct FloatWeights {
  const T* data;
  int64_t cols;

  explicit FloatWeights(const DeviceMatrix& w) : data(reinterpret_cast<const T*>(w.data)), cols(w.cols) {}
  __device__ float at(int64_t row, int k) const { return to_f(data[row * cols + k]); }
};

template <class F>
void with_float_type(GgmlType type, const F& f) {
  if (type == GgmlType::F32) return f(float());
  if (type == GgmlType::F16) return f(__half());
  return f(__nv_bfloat16());
}

// Calls f(weights) with a reader of the matrix.
template <class F>
void with_weights(const DeviceMatrix& w, const F& f) {
  if (w.format >= 0)
    with_format(w.format, [&](auto format) { f(QuantizedWeights<decltype(format)>(w)); });
  else
    with_float_type(w.type, [&](auto value) { f(FloatWeights<decltype(value)>(w)); });
}

}  // namespace rvllm::cuda
