// The table of the kernels above. Included inside an anonymous namespace, last.

template <PackedType Type>
constexpr auto linear_kernel() {
  if constexpr (Type <= PackedType::BF16)
    return &linear_float<int(Type)>;
  else
    return &linear_quantized<int(Type)>;
}

constexpr Kernels make_table(const char* name) {
  return {
      name,
      {linear_kernel<PackedType::F32>(), linear_kernel<PackedType::F16>(), linear_kernel<PackedType::BF16>(),
       linear_kernel<PackedType::Q4_0>(), linear_kernel<PackedType::Q4_1>(), linear_kernel<PackedType::Q5_0>(),
       linear_kernel<PackedType::Q5_1>(), linear_kernel<PackedType::Q8_0>(), linear_kernel<PackedType::Q2_K>(),
       linear_kernel<PackedType::Q3_K>(), linear_kernel<PackedType::Q4_K>(), linear_kernel<PackedType::Q5_K>(),
       linear_kernel<PackedType::Q6_K>()},
      &quantize_rows, &rms_norm, &rope, &gated_activation, &add_to, &scale_by, &store_kv, &attend_partition, &merge_partition,
  };
}
