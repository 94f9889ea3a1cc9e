// The table of the kernels above. Included inside an anonymous namespace, last.

template <int Type>
constexpr auto linear_kernel() {
  if constexpr (Type < int(PackedType::kFirstQuantized))
    return &linear_float<Type>;
  else
    return &linear_quantized<Type>;
}

template <int... Types>
struct TypeList {};

template <int N, int... Types>
constexpr auto types_below() {
  if constexpr (N == 0)
    return TypeList<Types...>{};
  else
    return types_below<N - 1, N - 1, Types...>();
}

template <int... Types>
constexpr Kernels make_table(const char* name, TypeList<Types...>) {
  return {
      name,
      {linear_kernel<Types>()...},
      {&unpack_row<Types>...},
      &quantize_rows, &rms_norm, &layer_norm, &rope, &activate, &add_to, &route, &sigmoid,
      &scale_by,
      {&store_kv<CacheF16>, &store_kv<CacheF32>, &store_kv<CacheBF16>, &store_kv<CacheQ8>},
      {&attend_partition<CacheF16>, &attend_partition<CacheF32>, &attend_partition<CacheBF16>,
       &attend_partition<CacheQ8>},
      &merge_partition,
      &dot_products,
  };
}

constexpr Kernels make_table(const char* name) { return make_table(name, types_below<kNumPackedTypes>()); }
