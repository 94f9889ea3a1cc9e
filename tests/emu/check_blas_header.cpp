// Compile-only: what csrc/cuda/blas.cpp writes down by hand is what NVIDIA's headers say. Needs nvidia-cublas (423 MB):
// g++ -std=c++17 -fsyntax-only -Icsrc -I$CUDA_HOME/include -I.../nvidia/cu13/include tests/emu/check_blas_header.cpp
#include <cublas_v2.h>

#include "cuda/blas.cpp"

namespace rvllm {
namespace {

static_assert(kOpN == CUBLAS_OP_N && kOpT == CUBLAS_OP_T);
static_assert(kComputeF32 == CUBLAS_COMPUTE_32F && kGemmDefault == CUBLAS_GEMM_DEFAULT);
static_assert(kDataTypes[int(BlasType::kF32)] == CUDA_R_32F && kDataTypes[int(BlasType::kF16)] == CUDA_R_16F &&
              kDataTypes[int(BlasType::kBF16)] == CUDA_R_16BF);
static_assert(sizeof(cublasStatus_t) == sizeof(int) && sizeof(cublasOperation_t) == sizeof(int) &&
              sizeof(cudaDataType) == sizeof(int) && sizeof(cublasComputeType_t) == sizeof(int) &&
              sizeof(cublasGemmAlgo_t) == sizeof(int) && sizeof(cublasHandle_t) == sizeof(void*));
static_assert(CUBLAS_STATUS_SUCCESS == 0);

// The real functions, with enums and handles where blas.cpp has int and void*.
cublasStatus_t (*const create)(cublasHandle_t*) = &cublasCreate_v2;
cublasStatus_t (*const destroy)(cublasHandle_t) = &cublasDestroy_v2;
cublasStatus_t (*const set_stream)(cublasHandle_t, cudaStream_t) = &cublasSetStream_v2;
cublasStatus_t (*const set_workspace)(cublasHandle_t, void*, size_t) = &cublasSetWorkspace_v2;
cublasStatus_t (*const gemm)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int, const void*,
                             const void*, cudaDataType, int, const void*, cudaDataType, int, const void*, void*,
                             cudaDataType, int, cublasComputeType_t, cublasGemmAlgo_t) = &cublasGemmEx;

}  // namespace
}  // namespace rvllm
