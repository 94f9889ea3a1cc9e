#include <dlfcn.h>

#include <stdexcept>

#include "cuda/blas.h"

namespace rvllm {
namespace {

void* open_library(const std::vector<std::string>& libraries) {
  for (const std::string& library : libraries)
    if (void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
  throw std::runtime_error("[cuda] cuBLAS is not installed: pip install 'rvllm[cuda]' brings it");
}

}  // namespace

void* blas_symbol(const std::vector<std::string>& libraries, const char* name) {
  static void* const library = open_library(libraries);
  if (void* symbol = dlsym(library, name)) return symbol;
  throw std::runtime_error("[cuda] the cuBLAS library has no function " + std::string(name));
}

}  // namespace rvllm
