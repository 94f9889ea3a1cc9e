#include "cuda/quantized_linear.inl"

namespace rvllm::cuda {

template void quantized_linear_of<FormatQ4_0>(const QuantizedLinearArgs&, int, int, cudaStream_t);
template void quantized_linear_of<FormatQ4_1>(const QuantizedLinearArgs&, int, int, cudaStream_t);
template void quantized_linear_of<FormatQ5_0>(const QuantizedLinearArgs&, int, int, cudaStream_t);
template void quantized_linear_of<FormatQ5_1>(const QuantizedLinearArgs&, int, int, cudaStream_t);
template void quantized_linear_of<FormatQ8_0>(const QuantizedLinearArgs&, int, int, cudaStream_t);

}  // namespace rvllm::cuda
