// cuBLAS, found at run time: rvllm._cuda imports and its own kernels run without it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace rvllm {

enum class BlasType { kF32, kF16, kBF16 };

// One cuBLAS handle on one stream. Its workspace is its own, so calls may be captured into a graph.
class Blas {
 public:
  // Opens the first of `libraries` that loads, paths or names (rvllm.cuda.cublas_libraries() lists them).
  // Throws runtime_error that says how to install cuBLAS when there is none.
  Blas(cudaStream_t stream, const std::vector<std::string>& libraries);

  // out[T, N] = x[T, K] w[N, K]^T, x and w of one type, accumulated in F32; rows of out lie out_stride floats apart.
  void matmul(float* out, int64_t out_stride, const void* x, const void* w, BlasType type, int64_t t, int64_t n,
              int64_t k);

 private:
  std::shared_ptr<void> workspace_, handle_;  // the handle goes first
};

// The address of a cuBLAS function; opens the library at the first call. The emulator links its own definition.
void* blas_symbol(const std::vector<std::string>& libraries, const char* name);

}  // namespace rvllm
