#include "cuda/quantized_linear.inl"

namespace rvllm::cuda {

template void quantized_linear_of<FormatTQ>(const QuantizedLinearArgs&, int, int, cudaStream_t);
template void quantized_linear_of<FormatIQ>(const QuantizedLinearArgs&, int, int, cudaStream_t);
template void quantized_linear_of<FormatIQ16>(const QuantizedLinearArgs&, int, int, cudaStream_t);
template void quantized_linear_of<FormatIQ4_NL>(const QuantizedLinearArgs&, int, int, cudaStream_t);
template void quantized_linear_of<FormatMXFP4>(const QuantizedLinearArgs&, int, int, cudaStream_t);

}  // namespace rvllm::cuda
