// Attention over blocks of keys and values, with the CPU's order of operations: scores sum over ascending dimensions,
// softmax sums over 16 lanes, values over ascending positions, partitions of 256 positions are merged in ascending
// order. So it gives the same bits for any batch, whether one block goes through all partitions or each has a block
// of its own.
#include "cuda/attention.h"

#include "cuda/kv_elements.h"

namespace rvllm::cuda {
namespace {

constexpr int kThreads = kPartition;  // each has one position while scores are made
constexpr int kWarps = kThreads / 32;

struct Merge {
  float keep, take;  // factors of the sum so far and of the next partition
};

// Adds a partition's largest score and total to the sum's. arXiv:1805.02867
__device__ __forceinline__ Merge merge(float& largest, float& total, float next_largest, float next_total) {
  if (next_total == 0.0f) return {1.0f, 0.0f};
  Merge m{0.0f, 1.0f};
  float both = next_largest;
  if (total != 0.0f) {
    both = largest > next_largest ? largest : next_largest;
    m.keep = ordered_exp(largest - both);
    m.take = ordered_exp(next_largest - both);
  }
  largest = both;
  total = fmaf(next_total, m.take, total * m.keep);
  return m;
}

__device__ __forceinline__ float merged(float sum, float next, Merge m) {
  return m.take == 0.0f && m.keep == 1.0f ? sum : fmaf(next, m.take, sum * m.keep);
}

__device__ __forceinline__ int first_visible(const AttentionArgs& a, int token) {
  const int position = a.positions[token];
  return a.window > 0 && position + 1 > a.window ? position + 1 - a.window : 0;
}

// A block's unit: which rows it has and which positions they see.
struct Unit {
  int first_token, first_head, heads, rows, first, last, first_partition, num_partitions, kv_head;
  const int* table;

  __device__ Unit(const AttentionArgs& a) {
    const AttentionUnit u = a.units[blockIdx.x];
    const int parts = (a.group + a.heads_a_unit - 1) / a.heads_a_unit, part = blockIdx.y % parts;
    kv_head = blockIdx.y / parts;
    first_token = u.first_token;
    first_head = kv_head * a.group + part * a.heads_a_unit;
    heads = min(a.heads_a_unit, a.group - part * a.heads_a_unit);
    rows = u.num_tokens * heads;
    first = first_visible(a, first_token);
    last = a.positions[first_token + u.num_tokens - 1] + 1;
    first_partition = first / kPartition;
    num_partitions = (last - 1) / kPartition + 1 - first_partition;
    table = a.block_tables + int64_t(u.request) * a.max_blocks;
  }
  __device__ int token(int row) const { return first_token + row / heads; }
  __device__ int head(int row) const { return first_head + row % heads; }
};

// sums[r] = q[r] . K[position], dimensions in ascending order.
template <class Cache, int R>
__device__ __forceinline__ void add_scores(const KVLayout& c, const uint8_t* keys, int at, const float* q, int q_stride,
                                           int rows, float (&sums)[R]) {
  using Element = typename Cache::Element;
  constexpr int kRun = 16 / sizeof(Element);
  const uint4* vectors = reinterpret_cast<const uint4*>(keys) + at;
  const float* const scales = reinterpret_cast<const float*>(keys + c.code_bytes) + at;
  for (int d = 0; d < c.padded_dim; d += kRun, vectors += c.block_size) {
    const uint4 words = __ldg(vectors);
    Element elements[kRun];
    memcpy(elements, &words, 16);
    const float scale = Cache::kScaled ? __ldg(scales + d / kKVScaleBlock * c.block_size) : 1.0f;
    float k[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      k[i] = Cache::widen(elements[i]);
      if constexpr (Cache::kScaled) k[i] = k[i] * scale;
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (r >= rows) break;
      const float4* const row = reinterpret_cast<const float4*>(q + r * q_stride + d);
#pragma unroll
      for (int i = 0; i < kRun / 4; ++i) {
        const float4 x = row[i];
        sums[r] = fmaf(x.x, k[4 * i], sums[r]);
        sums[r] = fmaf(x.y, k[4 * i + 1], sums[r]);
        sums[r] = fmaf(x.z, k[4 * i + 2], sums[r]);
        sums[r] = fmaf(x.w, k[4 * i + 3], sums[r]);
      }
    }
  }
}

// A warp turns a row's scores into weights exp(s - largest) and gives their total; 0: none is visible.
__device__ __forceinline__ float soften(float* scores, int lane, bool is_visible, float& largest) {
  constexpr int kSteps = kPartition / 32;
  float m = -INFINITY;
  for (int i = 0; i < kSteps; ++i) m = scores[32 * i + lane] > m ? scores[32 * i + lane] : m;
  for (int span = 16; span > 0; span /= 2) {
    const float other = __shfl_xor_sync(kFullWarp, m, span);
    m = other > m ? other : m;
  }
  largest = is_visible ? m : 0.0f;
  for (int i = 0; i < kSteps; ++i)
    scores[32 * i + lane] = is_visible ? ordered_exp(scores[32 * i + lane] - largest) : 0.0f;
  __syncwarp();
  float sum = 0.0f;
  for (int p = lane % kOrderedLanes; p < kPartition; p += kOrderedLanes) sum = sum + scores[p];
  return tree_sum16(sum);
}

// grid: [units, KV heads x parts of their query heads, partitions or 1]; block: 256 threads. Bound by reads of the
// cache while rows are few, by float operations else.
template <class Cache, int R>
__global__ void __launch_bounds__(kThreads, 2) attention_kernel(AttentionArgs a) {
  using Element = typename Cache::Element;
  RV_DYN_SHARED(float, shared);  // q [R, padded D], weights [R, kPartition]
  RV_SHARED(float, row_largest, R);
  RV_SHARED(float, row_total, R);
  RV_SHARED(float, row_keep, R);
  RV_SHARED(float, row_take, R);
  const KVLayout& c = a.cache;
  const Unit unit(a);
  const int begin_part = a.parts ? int(blockIdx.z) : 0, end_part = a.parts ? begin_part + 1 : unit.num_partitions;
  if (begin_part >= unit.num_partitions) return;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, dim = c.head_dim, q_stride = c.padded_dim;
  float* const q = shared;
  float* const weights = shared + R * q_stride;
  for (int i = tid; i < unit.rows * q_stride; i += kThreads) {
    const int r = i / q_stride, d = i % q_stride;
    q[i] = d < dim ? a.q[unit.token(r) * a.q_stride + int64_t(unit.head(r)) * dim + d] : 0.0f;
  }
  const uint8_t* const heads = c.data + 2 * unit.kv_head * c.matrix_bytes;
  // While values are weighed, threads are [row groups, dimensions].
  const int columns = (dim + 31) / 32 * 32, row_groups = kThreads / columns;
  const int d = tid % columns, row_group = tid / columns;
  const bool has_column = d < dim && row_group < row_groups;
  float values[R] = {};
  __syncthreads();

  for (int part = begin_part; part < end_part; ++part) {
    const int begin = (unit.first_partition + part) * kPartition;
    const int from = max(unit.first, begin), to = min(unit.last, begin + kPartition), position = begin + tid;
    float sums[R] = {};
    if (position >= from && position < to) {
      const uint8_t* const keys = heads + int64_t(unit.table[position / c.block_size]) * c.block_bytes;
      add_scores<Cache, R>(c, keys, position % c.block_size, q, q_stride, unit.rows, sums);
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (r >= unit.rows) break;
      const int token = unit.token(r);
      const bool is_visible = position >= max(from, first_visible(a, token)) && position <= a.positions[token];
      float s = sums[r] * a.scale;
      if (a.soft_cap > 0.0f) s = soft_capped(s, a.soft_cap);
      weights[r * kPartition + tid] = is_visible ? s : -INFINITY;
    }
    __syncthreads();
    for (int r = warp; r < unit.rows; r += kWarps) {
      const int token = unit.token(r);
      const bool sees_some = max(from, first_visible(a, token)) < min(to, a.positions[token] + 1);
      float largest;
      const float total = soften(weights + r * kPartition, lane, sees_some, largest);
      if (lane == 0) {
        if (part == begin_part) {
          row_largest[r] = largest;
          row_total[r] = total;
        } else {
          const Merge m = merge(row_largest[r], row_total[r], largest, total);
          row_keep[r] = m.keep;
          row_take[r] = m.take;
        }
      }
    }
    __syncthreads();
    if (has_column) {
      float next[R] = {};
      for (int p = from; p < to;) {
        const int at = p % c.block_size, run = min(c.block_size - at, to - p);
        const uint8_t* const block = heads + int64_t(unit.table[p / c.block_size]) * c.block_bytes + c.matrix_bytes;
        const Element* v = reinterpret_cast<const Element*>(block) + int64_t(at) * c.padded_dim + d;
        const float* scale = reinterpret_cast<const float*>(block + c.code_bytes) + at * c.scales + d / kKVScaleBlock;
        const float* weight = weights + row_group * kPartition + p - begin;
#pragma unroll 4
        for (int i = 0; i < run; ++i, v += c.padded_dim, scale += c.scales, ++weight) {
          float x = Cache::widen(__ldg(v));
          if constexpr (Cache::kScaled) x = x * __ldg(scale);
#pragma unroll
          for (int r = 0; r < R; ++r)
            if (row_group + r * row_groups < unit.rows) next[r] = fmaf(weight[r * row_groups * kPartition], x, next[r]);
        }
        p += run;
      }
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const int row = row_group + r * row_groups;
        if (row >= unit.rows) break;
        values[r] = part == begin_part ? next[r] : merged(values[r], next[r], {row_keep[row], row_take[row]});
      }
    }
    __syncthreads();
  }
  if (!has_column) return;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int row = row_group + r * row_groups;
    if (row >= unit.rows) break;
    const int token = unit.token(row), head = unit.head(row);
    if (a.parts) {
      // Tokens of one unit may begin and end at different partitions.
      const int first = first_visible(a, token) / kPartition, part = unit.first_partition + begin_part - first;
      if (part < 0 || part > a.positions[token] / kPartition - first) continue;
      float* const kept = a.parts + ((int64_t(token) * a.num_heads + head) * a.num_parts + part) * (2 + dim);
      if (d == 0) {
        kept[0] = row_largest[row];
        kept[1] = row_total[row];
      }
      kept[2 + d] = values[r];
    } else {
      float largest = row_largest[row], total = row_total[row], value = values[r];
      if (a.sinks) value = merged(value, 0.0f, merge(largest, total, a.sinks[head], 1.0f));
      a.out[token * a.out_stride + int64_t(head) * dim + d] = value * (1.0f / total);
    }
  }
}

// Merges the partitions of one token and head; a thread has one dimension. grid: [T, H].
__global__ void attention_merge_kernel(AttentionArgs a) {
  const int token = blockIdx.x, head = blockIdx.y, d = threadIdx.x, dim = a.cache.head_dim;
  if (d >= dim) return;
  const float* part = a.parts + (int64_t(token) * a.num_heads + head) * a.num_parts * (2 + dim);
  const int count = a.positions[token] / kPartition + 1 - first_visible(a, token) / kPartition;
  float largest = part[0], total = part[1], value = part[2 + d];
  for (int i = 1; i < count; ++i) {
    part += 2 + dim;
    value = merged(value, part[2 + d], merge(largest, total, part[0], part[1]));
  }
  if (a.sinks) value = merged(value, 0.0f, merge(largest, total, a.sinks[head], 1.0f));
  a.out[token * a.out_stride + int64_t(head) * dim + d] = value * (1.0f / total);
}

}  // namespace

void attention(const AttentionArgs& a, int num_units, int rows, int num_tokens, cudaStream_t stream) {
  const int parts_of_heads = (a.group + a.heads_a_unit - 1) / a.heads_a_unit;
  const dim3 grid(unsigned(num_units), unsigned(a.cache.num_kv_heads * parts_of_heads),
                  unsigned(a.parts ? a.num_parts : 1));
  with_kv_type(a.cache.type, [&](auto type) {
    using Cache = decltype(type);
    const auto start = [&](auto* kernel, int r) {
      const size_t shared = size_t(r) * (size_t(a.cache.padded_dim) + kPartition) * sizeof(float);
      rv::launch(kernel, grid, kThreads, shared, stream, a);
    };
    if (rows <= 1)
      start(attention_kernel<Cache, 1>, 1);
    else if (rows <= 4)
      start(attention_kernel<Cache, 4>, 4);
    else if (rows <= 8)
      start(attention_kernel<Cache, 8>, 8);
    else
      start(attention_kernel<Cache, 16>, 16);
  });
  if (a.parts)
    rv::launch(attention_merge_kernel, dim3(unsigned(num_tokens), unsigned(a.num_heads)),
               unsigned((a.cache.head_dim + 31) / 32 * 32), 0, stream, a);
}

}  // namespace rvllm::cuda
