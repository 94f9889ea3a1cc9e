// Attention over blocks of keys and values, with the CPU's order of operations, as in cuda/attention.cu: scores sum
// over ascending dimensions, softmax sums over 16 lanes, values over ascending positions, partitions of 256 positions
// are merged in ascending order. So it gives the same bits for any batch, whether one group goes through all partitions
// or each has a group of its own. arXiv:2309.06180
#include "metal/kv_elements.h"

constant int kPartition = 256;  // positions worked on at a time, and threads of a group

// Adds a partition's largest score and total to the sum's; returns the factors of both. arXiv:1805.02867
inline float2 merge(thread float& largest, thread float& total, float next_largest, float next_total) {
  if (next_total == 0.0f) return float2(1.0f, 0.0f);
  float keep = 0.0f, take = 1.0f, both = next_largest;
  if (total != 0.0f) {
    both = largest > next_largest ? largest : next_largest;
    keep = ordered_exp(largest - both);
    take = ordered_exp(next_largest - both);
  }
  largest = both;
  total = fma(next_total, take, total * keep);
  return float2(keep, take);
}

inline float merged(float sum, float next, float2 factors) {
  return factors.y == 0.0f && factors.x == 1.0f ? sum : fma(next, factors.y, sum * factors.x);
}

inline int first_visible(constant AttentionArgs& args, int position) {
  return args.window > 0 && position + 1 > args.window ? position + 1 - args.window : 0;
}

// sums[r] = q[r] . K[position], dimensions in ascending order.
template <int kKind, int R>
inline void add_scores(constant CacheArgs& c, device const uchar* keys, int at, threadgroup const float* q, int rows,
                       thread float (&sums)[R]) {
  const int run = Cache<kKind>::kRun, a_word = run / 4;
  device const uint4* vectors = (device const uint4*)keys + at;
  device const float* scales = (device const float*)(keys + c.code_bytes) + at;
  for (int d = 0; d < c.padded_dim; d += run, vectors += c.block_size) {
    const uint4 words = *vectors;
    const float scale = kKind == kCacheQ8 ? scales[d / kScaleBlock * c.block_size] : 1.0f;
    for (int i = 0; i < 4; ++i) {
      float4 k = widen<kKind>(words[i]);
      if (kKind == kCacheQ8) k = k * scale;
      for (int r = 0; r < R; ++r) {
        if (r >= rows) break;
        for (int j = 0; j < a_word; ++j) sums[r] = fma(q[r * c.padded_dim + d + i * a_word + j], k[j], sums[r]);
      }
    }
  }
}

// A simdgroup turns a row's scores of [begin, end), which are visible, into weights exp(s - largest), others into 0,
// and gives the total. No infinity stands for what is not visible: under fast math there is none.
inline float soften(threadgroup float* scores, int lane, int begin, int end, thread float& largest) {
  float m = begin < end ? scores[begin] : 0.0f;
  for (int i = begin + lane; i < end; i += 32) m = scores[i] > m ? scores[i] : m;
  for (ushort span = 16; span > 0; span /= 2) {
    const float other = simd_shuffle_xor(m, span);
    m = other > m ? other : m;
  }
  largest = m;
  for (int i = lane; i < kPartition; i += 32)
    scores[i] = i >= begin && i < end ? ordered_exp(scores[i] - largest) : 0.0f;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0.0f;
  for (int p = lane % kOrderedLanes; p < kPartition; p += kOrderedLanes) sum = sum + scores[p];
  return tree_sum16(sum);
}

// grid: [units, KV heads x parts of their query heads, partitions or 1]; a unit has at most R query rows.
template <int kKind, int R>
kernel void attention(constant AttentionArgs& args [[buffer(0)]],
                      device float* out [[buffer(1)]],               // [T, H * D]
                      device const float* queries [[buffer(2)]],     // [T, H * D]
                      device const uchar* cache [[buffer(3)]],
                      device const int4* units [[buffer(4)]],  // first token, tokens, request
                      device const int* positions [[buffer(5)]],     // [T]
                      device const int* block_tables [[buffer(6)]],  // [B, max_blocks]
                      device const float* sinks [[buffer(7)]],       // [H]
                      device float* parts [[buffer(8)]],             // [T, H, num_parts, 2 + D]
                      threadgroup float* shared [[threadgroup(0)]],  // q [R, padded D], weights [R, kPartition]
                      uint3 group [[threadgroup_position_in_grid]],
                      uint thread_index [[thread_index_in_threadgroup]],
                      uint lane_index [[thread_index_in_simdgroup]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float row_largest[8];
  threadgroup float row_total[8];
  threadgroup float row_keep[8];
  threadgroup float row_take[8];
  constant CacheArgs& c = args.cache;
  const int first_token = units[group.x].x, num_tokens = units[group.x].y, request = units[group.x].z;
  const int parts_of_heads = (args.group + args.heads_a_unit - 1) / args.heads_a_unit;
  const int kv_head = int(group.y) / parts_of_heads, part_of_heads = int(group.y) % parts_of_heads;
  const int first_head = kv_head * args.group + part_of_heads * args.heads_a_unit;
  const int heads = min(args.heads_a_unit, args.group - part_of_heads * args.heads_a_unit);
  const int rows = num_tokens * heads, first = first_visible(args, positions[first_token]);
  const int last = positions[first_token + num_tokens - 1] + 1, first_partition = first / kPartition;
  const int num_partitions = (last - 1) / kPartition + 1 - first_partition;
  device const int* table = block_tables + long(request) * args.max_blocks;
  const int begin_part = args.num_parts > 0 ? int(group.z) : 0;
  const int end_part = args.num_parts > 0 ? begin_part + 1 : num_partitions;
  if (begin_part >= num_partitions) return;
  const int tid = int(thread_index), lane = int(lane_index), dim = c.head_dim, q_stride = c.padded_dim;
  threadgroup float* q = shared;
  threadgroup float* weights = shared + R * q_stride;
  for (int i = tid; i < rows * q_stride; i += kPartition) {
    const int r = i / q_stride, d = i % q_stride;
    const long row = long(first_token + r / heads) * args.q_stride + (first_head + r % heads) * dim;
    q[i] = d < dim ? queries[row + d] : 0.0f;
  }
  device const uchar* cache_heads = cache + 2 * kv_head * c.matrix_bytes;
  // While values are weighed, threads are [row groups, dimensions].
  const int columns = (dim + 31) / 32 * 32, row_groups = kPartition / columns;
  const int d = tid % columns, row_group = tid / columns;
  const bool has_column = d < dim && row_group < row_groups;
  float values[R] = {};
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int part = begin_part; part < end_part; ++part) {
    const int begin = (first_partition + part) * kPartition;
    const int from = max(first, begin), to = min(last, begin + kPartition), position = begin + tid;
    float sums[R] = {};
    if (position >= from && position < to) {
      device const uchar* keys = cache_heads + table[position / c.block_size] * c.block_bytes;
      add_scores<kKind, R>(c, keys, position % c.block_size, q, rows, sums);
    }
    for (int r = 0; r < R; ++r) {
      if (r >= rows) break;
      const float s = sums[r] * args.scale;
      weights[r * kPartition + tid] = args.soft_cap > 0.0f ? soft_capped(s, args.soft_cap) : s;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int r = int(simdgroup); r < rows; r += kPartition / 32) {
      const int at = positions[first_token + r / heads];
      const int visible = max(from, first_visible(args, at)) - begin, visible_end = min(to, at + 1) - begin;
      float largest;
      const float total = soften(weights + r * kPartition, lane, visible, visible_end, largest);
      if (lane == 0) {
        if (part == begin_part) {
          row_largest[r] = largest;
          row_total[r] = total;
        } else {
          float sum_largest = row_largest[r], sum_total = row_total[r];
          const float2 factors = merge(sum_largest, sum_total, largest, total);
          row_largest[r] = sum_largest;
          row_total[r] = sum_total;
          row_keep[r] = factors.x;
          row_take[r] = factors.y;
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (has_column) {
      float next[R] = {};
      for (int p = from; p < to; ++p) {
        device const uchar* block = cache_heads + table[p / c.block_size] * c.block_bytes + c.matrix_bytes;
        const int at = p % c.block_size;
        float x = load_element<kKind>(block, long(at) * c.padded_dim + d);
        if (kKind == kCacheQ8) x = x * ((device const float*)(block + c.code_bytes))[at * c.scales + d / kScaleBlock];
        for (int r = 0; r < R; ++r) {
          const int row = row_group + r * row_groups;
          if (row < rows) next[r] = fma(weights[row * kPartition + p - begin], x, next[r]);
        }
      }
      for (int r = 0; r < R; ++r) {
        const int row = row_group + r * row_groups;
        if (row >= rows) break;
        if (part == begin_part)
          values[r] = next[r];
        else
          values[r] = merged(values[r], next[r], float2(row_keep[row], row_take[row]));
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (!has_column) return;
  for (int r = 0; r < R; ++r) {
    const int row = row_group + r * row_groups;
    if (row >= rows) break;
    const int token = first_token + row / heads, head = first_head + row % heads;
    if (args.num_parts > 0) {
      // Tokens of one unit may begin and end at different partitions.
      const int position = positions[token], skipped = first_visible(args, position) / kPartition;
      const int part = first_partition + begin_part - skipped;
      if (part < 0 || part > position / kPartition - skipped) continue;
      device float* kept = parts + ((long(token) * args.num_heads + head) * args.num_parts + part) * (2 + dim);
      if (d == 0) {
        kept[0] = row_largest[row];
        kept[1] = row_total[row];
      }
      kept[2 + d] = values[r];
    } else {
      float largest = row_largest[row], total = row_total[row], value = values[r];
      if (args.has_sinks) value = merged(value, 0.0f, merge(largest, total, sinks[head], 1.0f));
      out[long(token) * args.out_stride + head * dim + d] = value * (1.0f / total);
    }
  }
}

// Merges the partitions of one token and head; a thread has one dimension. grid: [T, H].
kernel void attention_merge(constant AttentionArgs& args [[buffer(0)]],
                            device float* out [[buffer(1)]],
                            device const int* positions [[buffer(2)]],
                            device const float* sinks [[buffer(3)]],
                            device const float* parts [[buffer(4)]],
                            uint2 group [[threadgroup_position_in_grid]],
                            uint thread_index [[thread_index_in_threadgroup]]) {
  const int token = int(group.x), head = int(group.y), d = int(thread_index), dim = args.cache.head_dim;
  if (d >= dim) return;
  device const float* part = parts + (long(token) * args.num_heads + head) * args.num_parts * (2 + dim);
  const int position = positions[token];
  const int count = position / kPartition + 1 - first_visible(args, position) / kPartition;
  float largest = part[0], total = part[1], value = part[2 + d];
  for (int i = 1; i < count; ++i) {
    part += 2 + dim;
    value = merged(value, part[2 + d], merge(largest, total, part[0], part[1]));
  }
  if (args.has_sinks) value = merged(value, 0.0f, merge(largest, total, sinks[head], 1.0f));
  out[long(token) * args.out_stride + head * dim + d] = value * (1.0f / total);
}

typedef decltype(attention<kCacheF16, 1>) attention_t;
template [[host_name("attention_f16_1")]] kernel attention_t attention<kCacheF16, 1>;
template [[host_name("attention_f16_4")]] kernel attention_t attention<kCacheF16, 4>;
template [[host_name("attention_f16_8")]] kernel attention_t attention<kCacheF16, 8>;
template [[host_name("attention_f32_1")]] kernel attention_t attention<kCacheF32, 1>;
template [[host_name("attention_f32_4")]] kernel attention_t attention<kCacheF32, 4>;
template [[host_name("attention_f32_8")]] kernel attention_t attention<kCacheF32, 8>;
template [[host_name("attention_bf16_1")]] kernel attention_t attention<kCacheBF16, 1>;
template [[host_name("attention_bf16_4")]] kernel attention_t attention<kCacheBF16, 4>;
template [[host_name("attention_bf16_8")]] kernel attention_t attention<kCacheBF16, 8>;
template [[host_name("attention_q8_0_1")]] kernel attention_t attention<kCacheQ8, 1>;
template [[host_name("attention_q8_0_4")]] kernel attention_t attention<kCacheQ8, 4>;
template [[host_name("attention_q8_0_8")]] kernel attention_t attention<kCacheQ8, 8>;
