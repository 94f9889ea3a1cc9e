// cuBLAS as the emulator has it: the arguments checked as we read its manual, products summed in F32 in an order of our
// own.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/blas.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "emu/cuda/runtime_state.h"

namespace rvllm {
namespace {

enum Status { kSuccess = 0, kNotInitialized = 1, kInvalidValue = 7, kNotSupported = 15 };
constexpr int kOpN = 0, kF32 = 0, kF16 = 2, kBF16 = 14, kComputeF32 = 68, kGemmDefault = -1;

struct Handle {
  cudaStream_t stream = nullptr;
  int device = emu::current_device();
};
int g_handles = 0;

int create(void** handle) {
  *handle = new Handle;
  ++g_handles;
  return kSuccess;
}

// The device must be the one of cublasCreate.
int destroy(void* handle) {
  if (static_cast<Handle*>(handle)->device != emu::current_device()) return kNotInitialized;
  delete static_cast<Handle*>(handle);
  --g_handles;
  return kSuccess;
}

int set_stream(void* handle, cudaStream_t stream) {
  if (emu::setting("RVLLM_EMU_BROKEN_CUBLAS", 0)) return kNotInitialized;
  static_cast<Handle*>(handle)->stream = stream;
  return kSuccess;
}

int set_workspace(void*, void* workspace, size_t bytes) {
  return bytes == 0 || emu::on_device(workspace, bytes) ? kSuccess : kInvalidValue;
}

size_t element_bytes(int type) { return type == kF32 ? 4 : 2; }

float load(const void* data, int type, size_t i) {
  if (type == kF32) return static_cast<const float*>(data)[i];
  if (type == kF16) return float(static_cast<const __half*>(data)[i]);
  return float(static_cast<const __nv_bfloat16*>(data)[i]);
}

// Column `j` of op(x), `k` long, where x is column-major with leading dimension `ld`.
std::vector<float> column(const void* x, int type, bool transposed, int ld, int j, int k) {
  std::vector<float> values(static_cast<size_t>(k));
  for (int i = 0; i < k; ++i)
    values[i] = load(x, type, transposed ? size_t(j) + size_t(i) * ld : size_t(j) * ld + size_t(i));
  return values;
}

float dot(const float* a, const float* b, int k) {
  float sums[16] = {};
  for (int i = 0; i < k; ++i) sums[i % 16] += a[i] * b[i];
  float sum = 0;
  for (const float s : sums) sum += s;
  return sum;
}

// Whether a column-major matrix of `columns` columns of `rows` elements lies in one allocation of the device.
bool matrix_on_device(const void* x, int type, int ld, int rows, int columns) {
  return emu::on_device(x, (size_t(ld) * size_t(columns - 1) + size_t(rows)) * element_bytes(type));
}

// C[m, n] = alpha op(A)[m, k] op(B)[k, n] + beta C, all column-major.
int gemm_ex(void* handle, int op_a, int op_b, int m, int n, int k, const void* alpha, const void* a, int type_a,
            int lda, const void* b, int type_b, int ldb, const void* beta, void* c, int type_c, int ldc, int compute,
            int algorithm) {
  if (!handle) return kNotInitialized;
  const bool trans_a = op_a != kOpN, trans_b = op_b != kOpN;
  const int rows_a = trans_a ? k : m, cols_a = trans_a ? m : k, rows_b = trans_b ? n : k, cols_b = trans_b ? k : n;
  if (m < 0 || n < 0 || k < 0 || lda < std::max(1, rows_a) || ldb < std::max(1, rows_b) || ldc < std::max(1, m) ||
      !alpha || !beta || algorithm != kGemmDefault)
    return kInvalidValue;
  const bool known = type_a == kF32 || type_a == kF16 || type_a == kBF16;
  if (!known || type_a != type_b || (type_c != kF32 && type_c != type_a) || compute != kComputeF32)
    return kNotSupported;
  if (m == 0 || n == 0) return kSuccess;
  const float scale = *static_cast<const float*>(alpha), keep = *static_cast<const float*>(beta);
  const cudaError_t error = emu::enqueue(static_cast<Handle*>(handle)->stream, [=] {
    if (!matrix_on_device(a, type_a, lda, rows_a, cols_a) || !matrix_on_device(b, type_b, ldb, rows_b, cols_b) ||
        !matrix_on_device(c, type_c, ldc, m, n)) {
      emu::set_report("cublasGemmEx: a matrix does not lie in one allocation of device memory");
      return cudaErrorLaunchFailure;
    }
    std::vector<std::vector<float>> columns_b;
    for (int j = 0; j < n; ++j) columns_b.push_back(column(b, type_b, trans_b, ldb, j, k));
    for (int i = 0; i < m; ++i) {
      const std::vector<float> row_a = column(a, type_a, !trans_a, lda, i, k);
      for (int j = 0; j < n; ++j) {
        const size_t at = size_t(i) + size_t(j) * size_t(ldc);
        float value = scale * dot(row_a.data(), columns_b[j].data(), k);
        if (keep != 0) value += keep * load(c, type_c, at);
        if (type_c == kF32) static_cast<float*>(c)[at] = value;
        if (type_c == kF16) static_cast<__half*>(c)[at] = __half(value);
        if (type_c == kBF16) static_cast<__nv_bfloat16*>(c)[at] = __nv_bfloat16(value);
      }
    }
    return cudaSuccess;
  });
  return error == cudaSuccess ? kSuccess : kInvalidValue;
}

struct Function {
  const char* name;
  void* address;
};
const Function kFunctions[] = {
    {"cublasCreate_v2", reinterpret_cast<void*>(&create)},
    {"cublasDestroy_v2", reinterpret_cast<void*>(&destroy)},
    {"cublasSetStream_v2", reinterpret_cast<void*>(&set_stream)},
    {"cublasSetWorkspace_v2", reinterpret_cast<void*>(&set_workspace)},
    {"cublasGemmEx", reinterpret_cast<void*>(&gemm_ex)},
};

}  // namespace

extern "C" __attribute__((visibility("default"))) int rv_emu_cublas_handles() { return g_handles; }

void* blas_symbol(const std::vector<std::string>&, const char* name) {
  for (const Function& f : kFunctions)
    if (std::strcmp(f.name, name) == 0) return f.address;
  throw std::runtime_error("the emulator has no " + std::string(name));
}

}  // namespace rvllm
