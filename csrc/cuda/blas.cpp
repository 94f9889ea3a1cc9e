#include "cuda/blas.h"

#include <stdexcept>

#include "cuda/device_buffer.h"

namespace rvllm {
namespace {

// From cublas_api.h and library_types.h, so that no cuBLAS header is needed; tests/emu/check_blas_header.cpp compares.
constexpr int kOpN = 0, kOpT = 1, kComputeF32 = 68, kGemmDefault = -1;
constexpr int kDataTypes[] = {0, 2, 14};  // CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF, in the order of BlasType
constexpr size_t kWorkspaceBytes = size_t(32) << 20;

using Create = int (*)(void** handle);
using Destroy = int (*)(void* handle);
using SetStream = int (*)(void* handle, cudaStream_t stream);
using SetWorkspace = int (*)(void* handle, void* workspace, size_t bytes);
using GemmEx = int (*)(void* handle, int op_a, int op_b, int m, int n, int k, const void* alpha, const void* a,
                       int type_a, int lda, const void* b, int type_b, int ldb, const void* beta, void* c, int type_c,
                       int ldc, int compute, int algorithm);

struct Functions {
  Create create;
  Destroy destroy;
  SetStream set_stream;
  SetWorkspace set_workspace;
  GemmEx gemm;
};

const Functions& functions(const std::vector<std::string>& libraries) {
  static const Functions loaded{
      reinterpret_cast<Create>(blas_symbol(libraries, "cublasCreate_v2")),
      reinterpret_cast<Destroy>(blas_symbol(libraries, "cublasDestroy_v2")),
      reinterpret_cast<SetStream>(blas_symbol(libraries, "cublasSetStream_v2")),
      reinterpret_cast<SetWorkspace>(blas_symbol(libraries, "cublasSetWorkspace_v2")),
      reinterpret_cast<GemmEx>(blas_symbol(libraries, "cublasGemmEx")),
  };
  return loaded;
}

void check_blas(int status, const char* what) {
  if (status != 0)
    throw std::runtime_error("[cuda] cuBLAS: " + std::string(what) + " failed with status " + std::to_string(status));
}

}  // namespace

Blas::Blas(cudaStream_t stream, const std::vector<std::string>& libraries)
    : workspace_(cuda::device_memory(kWorkspaceBytes, "the workspace of cuBLAS")) {
  const Functions& blas = functions(libraries);
  void* handle = nullptr;
  check_blas(blas.create(&handle), "cublasCreate");
  handle_ = std::shared_ptr<void>(handle, [&blas](void* h) { blas.destroy(h); });
  check_blas(blas.set_stream(handle, stream), "cublasSetStream");  // also forgets a workspace: the order matters
  check_blas(blas.set_workspace(handle, workspace_.get(), kWorkspaceBytes), "cublasSetWorkspace");
}

// Row-major [T, N] is cuBLAS's column-major [N, T].
void Blas::matmul(float* out, int64_t out_stride, const void* x, const void* w, BlasType type, int64_t t, int64_t n,
                  int64_t k) {
  const float one = 1, zero = 0;
  const int data_type = kDataTypes[int(type)];
  check_blas(functions({}).gemm(handle_.get(), kOpT, kOpN, int(n), int(t), int(k), &one, w, data_type, int(k), x,
                                data_type, int(k), &zero, out, kDataTypes[0], int(out_stride), kComputeF32,
                                kGemmDefault),
             "cublasGemmEx");
}

}  // namespace rvllm
