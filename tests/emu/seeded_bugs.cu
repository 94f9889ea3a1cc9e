// Programs with one bug each, and their repaired twins: seeded_bugs NAME bug|fixed. Prints "right" or "wrong" (the
// results), or the error of CUDA; test_detectors.py says which check must find what.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cuda/gpu.h"

using rvllm::check_cuda;
using rvllm::kFullWarp;

namespace {

constexpr int kThreads = 128;

// ---- kernels: out[i] for each thread, as the cases below expect it

template <bool kFixed>
__global__ void sum_without_syncthreads(float* out) {
  RV_SHARED(float, part, 4);
  float v = 1;
  for (int offset = 16; offset > 0; offset >>= 1) v += __shfl_xor_sync(kFullWarp, v, offset);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  if (kFixed) __syncthreads();
  out[threadIdx.x] = part[0] + part[1] + part[2] + part[3];
}

template <bool kFixed>
__global__ void exchange_without_syncwarp(float* out) {
  RV_SHARED(float, values, kThreads);
  values[threadIdx.x] = float(threadIdx.x);
  if (kFixed) __syncwarp();
  out[threadIdx.x ^ 1] = values[threadIdx.x ^ 1];
}

template <bool kFixed>
__global__ void blocks_race(float* out) {
  if (kFixed)
    atomicAdd(&out[threadIdx.x], 1.0f);
  else
    out[threadIdx.x] += 1;
}

// A barrier orders the threads of one block, not the blocks.
template <bool kFixed>
__global__ void blocks_race_across_barriers(float* out) {
  RV_SHARED(float, values, kThreads);
  if (blockIdx.x == 0) out[threadIdx.x] = 1;
  values[threadIdx.x] = 1;
  __syncthreads();
  __syncwarp();
  if (blockIdx.x == (kFixed ? 0 : 1)) out[threadIdx.x] *= values[threadIdx.x ^ 32];
  __syncthreads();
}

template <bool kFixed>
__global__ void uninitialised_shared(float* out) {
  RV_SHARED(float, values, kThreads);
  if (kFixed) values[threadIdx.x] = 1;
  out[threadIdx.x] = values[threadIdx.x];
}

template <bool kFixed>
__global__ void divergent_barrier(float* out) {
  if (kFixed || threadIdx.x < 64)
    __syncthreads();
  else
    __syncthreads();
  out[threadIdx.x] = 1;
}

template <bool kFixed>
__global__ void barrier_against_shuffle(float* out) {
  if (kFixed || threadIdx.x % 2 == 1) __syncthreads();
  out[threadIdx.x] = __shfl_xor_sync(kFullWarp, 1.0f, 1);
  if (!kFixed && threadIdx.x % 2 == 0) __syncthreads();
}

template <bool kFixed>
__global__ void exit_before_shuffle(float* out, int n) {
  if (!kFixed && int(threadIdx.x) >= n) return;
  const float v = __shfl_xor_sync(kFullWarp, 1.0f, 1);
  if (int(threadIdx.x) < n) out[threadIdx.x] = v;
}

template <bool kFixed>
__global__ void lane_outside_its_mask(float* out) {
  out[threadIdx.x] = __shfl_xor_sync(kFixed ? kFullWarp : 0xffffu, 1.0f, 1);
}

template <bool kFixed>
__global__ void reads_absent_lane(float* out) {
  if (kFixed || threadIdx.x % 32 < 16) out[threadIdx.x] = __shfl_xor_sync(kFixed ? kFullWarp : 0xffffu, 1.0f, 16);
}

template <bool kFixed>
__global__ void too_much_static_shared(float* out) {
  RV_SHARED(float, a, 8192);
  RV_SHARED(float, b, kFixed ? 128 : 8192);
  a[threadIdx.x] = 0.5f;
  b[threadIdx.x] = 0.5f;
  out[threadIdx.x] = a[threadIdx.x] + b[threadIdx.x];
}

template <bool kFixed>
__global__ void overread(float* out, const float* ones, int n) {
  float v = 0;
  for (int i = int(threadIdx.x); i < n + (kFixed ? 0 : 1); i += kThreads) v += ones[i];
  out[threadIdx.x] = v;
}

template <bool kFixed>
__global__ void shared_overflow(float* out) {
  RV_SHARED(float, values, kThreads);
  RV_SHARED(float, others, kThreads);
  values[threadIdx.x] = others[threadIdx.x] = 1;
  out[threadIdx.x] = values[threadIdx.x + (kFixed ? 0 : 1)];
}

template <bool kFixed>
__global__ void misaligned_float4(float* out, const float* ones) {
  const float4 v = *reinterpret_cast<const float4*>(ones + (kFixed ? 4 : 1));
  out[threadIdx.x] = v.x;
}

template <bool kFixed>
__global__ void integer_overflow(float* out, int large) {
  const int twice = kFixed ? large / 2 + large / 2 : large + large;
  out[threadIdx.x] = twice == large / 2 * 2 ? 1 : 0;
}

__global__ void ones(float* out) { out[threadIdx.x] = 1; }
__global__ void dynamic_shared(float* out) {
  RV_DYN_SHARED(float, values);
  values[threadIdx.x] = 1;
  out[threadIdx.x] = values[threadIdx.x];
}

// ---- the machine they run on

using Expected = std::function<float(int)>;

struct Device {
  float* data = nullptr;     // [kThreads], zeros
  float* host = nullptr;     // [kThreads], pinned
  cudaStream_t stream = nullptr;

  Device() {
    data = static_cast<float*>(rvllm::device_malloc(kThreads * sizeof(float), "results"));
    check_cuda(cudaMallocHost(&host, kThreads * sizeof(float)), "cudaMallocHost");
    check_cuda(cudaStreamCreate(&stream), "cudaStreamCreate");
    check_cuda(cudaMemset(data, 0, kThreads * sizeof(float)), "cudaMemset");
  }
  void start_download() {
    check_cuda(cudaMemcpyAsync(host, data, kThreads * sizeof(float), cudaMemcpyDeviceToHost, stream), "download");
  }
  void expect(const Expected& expected) {
    start_download();
    check_cuda(cudaStreamSynchronize(stream), "the kernel");
    check_host(expected);
  }
  void check_host(const Expected& expected) const {
    bool right = true;
    for (int i = 0; i < kThreads; ++i) right &= host[i] == expected(i);
    std::puts(right ? "right" : "wrong");
  }
};

float one(int) { return 1; }

template <class Kernel, class... A>
void run(Kernel fixed_kernel, Kernel buggy_kernel, bool fixed, int blocks, const Expected& expected, A... arguments) {
  Device d;
  rv::launch(fixed ? fixed_kernel : buggy_kernel, blocks, kThreads, 0, d.stream, d.data, arguments...);
  d.expect(expected);
}

void launch_shape(dim3 grid, dim3 block, size_t shared_bytes) {
  Device d;
  rv::launch(dynamic_shared, grid, block, shared_bytes, d.stream, d.data);
  d.expect(one);
}

float* device_ones(int n) {
  auto* data = static_cast<float*>(rvllm::device_malloc(size_t(n) * sizeof(float), "ones"));
  const std::vector<float> values(size_t(n), 1.0f);
  check_cuda(cudaMemcpy(data, values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice), "upload");
  return data;
}

void host_dereference(bool fixed) {
  Device d;
  rv::launch(ones, 1, kThreads, 0, d.stream, d.data);
  check_cuda(cudaStreamSynchronize(d.stream), "the kernel");
  if (fixed) return d.expect(one);
  std::puts(*static_cast<volatile float*>(d.data) == 1 ? "right" : "wrong");
}

void missing_synchronization(bool fixed) {
  Device d;
  rv::launch(ones, 1, kThreads, 0, d.stream, d.data);
  d.start_download();
  if (fixed) check_cuda(cudaStreamSynchronize(d.stream), "the kernel");
  d.check_host(one);
}

void pinned_buffer_used_again(bool fixed) {
  Device d;
  for (int i = 0; i < kThreads; ++i) d.host[i] = 1;
  check_cuda(cudaMemcpyAsync(d.data, d.host, kThreads * sizeof(float), cudaMemcpyHostToDevice, d.stream), "upload");
  if (fixed) check_cuda(cudaStreamSynchronize(d.stream), "upload");
  for (int i = 0; i < kThreads; ++i) d.host[i] = 2;
  d.expect(one);
}

void streams_without_event(bool fixed) {
  Device d;
  cudaStream_t other = nullptr;
  cudaEvent_t event = nullptr;
  check_cuda(cudaStreamCreate(&other), "cudaStreamCreate");
  check_cuda(cudaDeviceSynchronize(), "the memset");
  check_cuda(cudaEventCreate(&event), "cudaEventCreate");
  rv::launch(ones, 1, kThreads, 0, other, d.data);
  check_cuda(cudaEventRecord(event, other), "cudaEventRecord");
  if (fixed) check_cuda(cudaStreamWaitEvent(d.stream, event), "cudaStreamWaitEvent");
  d.expect(one);
}

// A stream that does not take turns with the default one, where the kernel runs.
void default_stream_unwaited(bool fixed) {
  Device d;
  cudaStream_t other = nullptr;
  check_cuda(cudaDeviceSynchronize(), "zeros");
  check_cuda(cudaStreamCreateWithFlags(&other, fixed ? cudaStreamDefault : cudaStreamNonBlocking), "cudaStreamCreate");
  std::swap(d.stream, other);
  rv::launch(ones, 1, kThreads, 0, nullptr, d.data);
  d.expect(one);
}

void wrong_copy_kind(bool fixed) {
  Device d;
  const auto kind = fixed ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
  rv::launch(ones, 1, kThreads, 0, d.stream, d.data);
  check_cuda(cudaMemcpyAsync(d.host, d.data, kThreads * sizeof(float), kind, d.stream), "download");
  d.expect(one);
}

void copy_too_long(bool fixed) {
  Device d;
  rv::launch(ones, 1, kThreads, 0, d.stream, d.data);
  check_cuda(cudaMemcpyAsync(d.host, d.data, (kThreads + (fixed ? 0 : 1)) * sizeof(float), cudaMemcpyDeviceToHost,
                             d.stream),
             "download");
  d.expect(one);
}

void synchronization_in_capture(bool fixed) {
  Device d;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check_cuda(cudaStreamBeginCapture(d.stream, cudaStreamCaptureModeGlobal), "begin");
  rv::launch(blocks_race<true>, 1, kThreads, 0, d.stream, d.data);
  if (!fixed) check_cuda(cudaStreamSynchronize(d.stream), "synchronize");
  check_cuda(cudaStreamEndCapture(d.stream, &graph), "end");
  check_cuda(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  for (int i = 0; i < 3; ++i) check_cuda(cudaGraphLaunch(executable, d.stream), "launch");
  d.expect([](int) { return 3.0f; });  // once a launch of the graph, never at its capture
}

using Run = void (*)(bool fixed);
struct Case {
  const char* name;
  Run run;
};

#define KERNELS(name) name<true>, name<false>
const Case kCases[] = {
    {"sum_without_syncthreads",
     [](bool f) { run(KERNELS(sum_without_syncthreads), f, 1, [](int) { return 128.0f; }); }},
    {"exchange_without_syncwarp",
     [](bool f) { run(KERNELS(exchange_without_syncwarp), f, 1, [](int i) { return float(i); }); }},
    {"blocks_race", [](bool f) { run(KERNELS(blocks_race), f, 4, [](int) { return 4.0f; }); }},
    {"blocks_race_across_barriers", [](bool f) { run(KERNELS(blocks_race_across_barriers), f, 2, one); }},
    {"uninitialised_shared", [](bool f) { run(KERNELS(uninitialised_shared), f, 1, one); }},
    {"divergent_barrier", [](bool f) { run(KERNELS(divergent_barrier), f, 1, one); }},
    {"barrier_against_shuffle", [](bool f) { run(KERNELS(barrier_against_shuffle), f, 1, one); }},
    {"exit_before_shuffle",
     [](bool f) { run(KERNELS(exit_before_shuffle), f, 1, [](int i) { return i < 100 ? 1.0f : 0.0f; }, 100); }},
    {"lane_outside_its_mask", [](bool f) { run(KERNELS(lane_outside_its_mask), f, 1, one); }},
    {"reads_absent_lane", [](bool f) { run(KERNELS(reads_absent_lane), f, 1, one); }},
    {"too_much_static_shared", [](bool f) { run(KERNELS(too_much_static_shared), f, 1, one); }},
    {"overread",
     [](bool f) { run(KERNELS(overread), f, 1, one, static_cast<const float*>(device_ones(kThreads)), kThreads); }},
    {"shared_overflow", [](bool f) { run(KERNELS(shared_overflow), f, 1, one); }},
    {"misaligned_float4",
     [](bool f) { run(KERNELS(misaligned_float4), f, 1, one, static_cast<const float*>(device_ones(8))); }},
    {"integer_overflow", [](bool f) { run(KERNELS(integer_overflow), f, 1, one, 0x7ffffffe); }},
    {"too_many_threads", [](bool f) { launch_shape(1, f ? kThreads : 1025, 4200); }},
    {"empty_grid", [](bool f) { launch_shape(f ? 1 : 0, kThreads, 512); }},
    {"grid_too_high", [](bool f) { launch_shape(dim3(1, f ? 1 : 70000), kThreads, 512); }},
    {"too_much_dynamic_shared", [](bool f) { launch_shape(1, kThreads, f ? 48 << 10 : 50000); }},
    {"host_dereference", host_dereference},
    {"missing_synchronization", missing_synchronization},
    {"pinned_buffer_used_again", pinned_buffer_used_again},
    {"streams_without_event", streams_without_event},
    {"wrong_copy_kind", wrong_copy_kind},
    {"copy_too_long", copy_too_long},
    {"synchronization_in_capture", synchronization_in_capture},
    {"default_stream_unwaited", default_stream_unwaited},
    {"no_device", [](bool) { rvllm::require_device(0); }},
    {"out_of_memory", [](bool f) { device_ones(f ? 1 : 1 << 20); }},
};

}  // namespace

int main(int argc, char** argv) {
  for (const Case& c : kCases) {
    if (argc != 3 || std::strcmp(argv[1], c.name) != 0) continue;
    try {
      c.run(std::strcmp(argv[2], "fixed") == 0);
    } catch (const std::exception& error) {
      std::printf("error: %s\n", error.what());
    }
    return 0;
  }
  std::printf("usage: seeded_bugs NAME bug|fixed\n");
  return 2;
}
