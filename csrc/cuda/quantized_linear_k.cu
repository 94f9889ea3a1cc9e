#include "cuda/quantized_linear.inl"

namespace rvllm::cuda {

template void quantized_linear_of<FormatQ2_K>(const QuantizedLinearArgs&, int, int, cudaStream_t);
template void quantized_linear_of<FormatQ3_K>(const QuantizedLinearArgs&, int, int, cudaStream_t);
template void quantized_linear_of<FormatQ4_K>(const QuantizedLinearArgs&, int, int, cudaStream_t);
template void quantized_linear_of<FormatQ5_K>(const QuantizedLinearArgs&, int, int, cudaStream_t);
template void quantized_linear_of<FormatQ6_K>(const QuantizedLinearArgs&, int, int, cudaStream_t);

}  // namespace rvllm::cuda
