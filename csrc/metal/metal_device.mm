// Manual retain and release, in Own: automatic counting cannot run outside of macOS, where this file is tested.
#include "metal/metal_device.h"

#import <Foundation/Foundation.h>
#import <Metal/Metal.h>
#import <MetalPerformanceShaders/MetalPerformanceShaders.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <unordered_map>

namespace rvllm {
namespace {

// One reference to an object, released with it.
template <class T>
class Own {
 public:
  Own() = default;
  explicit Own(T object) : object_(object) {}
  static Own retained(T object) { return Own([object retain]); }
  Own(Own&& other) noexcept : object_(other.object_) { other.object_ = nil; }
  Own& operator=(Own&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Own() { [object_ release]; }
  T get() const { return object_; }
  explicit operator bool() const { return object_ != nil; }
  void reset() { *this = Own(); }

 private:
  T object_ = nil;
};

struct AutoreleasePool {
  NSAutoreleasePool* pool = [[NSAutoreleasePool alloc] init];
  ~AutoreleasePool() { [pool drain]; }
};

NSString* string(const std::string& text) { return [NSString stringWithUTF8String:text.c_str()]; }

[[noreturn]] void fail(const std::string& text, NSError* error = nil) {
  throw std::runtime_error(error ? text + ": " + [[error localizedDescription] UTF8String] : text);
}

// Messages to nil do nothing: what Metal does not give would show in the results alone.
template <class T>
T given(T object, const char* what) {
  if (!object) fail(std::string("Metal gives no ") + what);
  return object;
}

Own<id<MTLLibrary>> load_library(id<MTLDevice> device, const std::string& path) {
  NSError* error = nil;
  Own<id<MTLLibrary>> library;
  if (path.size() > 9 && path.compare(path.size() - 9, 9, ".metallib") == 0) {
    library = Own<id<MTLLibrary>>([device newLibraryWithURL:[NSURL fileURLWithPath:string(path)] error:&error]);
  } else {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream source;
    source << file.rdbuf();
    if (!file || source.str().empty()) fail("cannot read the Metal kernels in " + path);
    const Own<MTLCompileOptions*> options([[MTLCompileOptions alloc] init]);
    [options.get() setFastMathEnabled:NO];  // from macOS 15 on the same as the safe math mode with precise functions
    library = Own<id<MTLLibrary>>([device newLibraryWithSource:string(source.str())
                                                       options:options.get()
                                                         error:&error]);
  }
  if (!library) fail("Metal cannot load the kernels in " + path, error);
  return library;
}

Own<id<MTLComputePipelineState>> make_pipeline(id<MTLDevice> device, id<MTLLibrary> library, const KernelRow& row) {
  NSError* error = nil;
  Own<id<MTLFunction>> function;
  if (row.constant < 0) {
    function = Own<id<MTLFunction>>([library newFunctionWithName:string(row.function)]);
  } else {
    const Own<MTLFunctionConstantValues*> values([[MTLFunctionConstantValues alloc] init]);
    [values.get() setConstantValue:&row.value type:MTLDataTypeBool atIndex:NSUInteger(row.constant)];
    function = Own<id<MTLFunction>>([library newFunctionWithName:string(row.function)
                                                  constantValues:values.get()
                                                           error:&error]);
  }
  if (!function) fail("the Metal library has no kernel '" + row.function + "'", error);
  Own<id<MTLComputePipelineState>> pipeline([device newComputePipelineStateWithFunction:function.get() error:&error]);
  if (!pipeline) fail("Metal cannot make the kernel '" + row.name + "'", error);
  if ([pipeline.get() threadExecutionWidth] != 32)
    fail("the kernels need simdgroups of 32 threads, those of this device have " +
         std::to_string([pipeline.get() threadExecutionWidth]));
  const NSUInteger most = [pipeline.get() maxTotalThreadsPerThreadgroup];
  if (most < NSUInteger(row.threads))
    fail("Metal runs the kernel '" + row.name + "' with at most " + std::to_string(most) + " threads, it needs " +
         std::to_string(row.threads));
  return pipeline;
}

}  // namespace

constexpr int kMostDispatches = 64;  // of a command buffer: the GPU begins while others are encoded

struct MetalDevice::State {
  Own<id<MTLDevice>> device;
  Own<id<MTLCommandQueue>> queue;
  std::unordered_map<std::string, Own<id<MTLComputePipelineState>>> pipelines;
  std::map<uintptr_t, Own<id<MTLBuffer>>> buffers;  // by their address on the host
  std::shared_ptr<void> unused;                     // stands for what a kernel does not read
  Own<id<MTLCommandBuffer>> commands;
  Own<id<MTLComputeCommandEncoder>> encoder;
  int num_dispatches = 0;  // in commands
  std::vector<Own<id<MTLCommandBuffer>>> committed;

  std::pair<id<MTLBuffer>, NSUInteger> find(const void* data) const {
    const auto address = uintptr_t(data);
    auto it = buffers.upper_bound(address);
    if (it != buffers.begin()) {
      --it;
      const id<MTLBuffer> buffer = it->second.get();
      if (address - it->first < [buffer length]) return {buffer, NSUInteger(address - it->first)};
    }
    throw std::logic_error("a pointer that is in no Metal buffer");
  }
  void begin_commands() {
    if (!commands)
      commands = Own<id<MTLCommandBuffer>>::retained(given([queue.get() commandBuffer], "command buffer"));
  }
  void end_encoder() {
    if (encoder) [encoder.get() endEncoding];
    encoder.reset();
  }
};

MetalDevice::MetalDevice(const std::string& library, const std::vector<KernelRow>& kernels)
    : state_(std::make_shared<State>()) {
  const AutoreleasePool pool;
  State& s = *state_;
  // Else macOS ends long commands while a display is on ("Impacting Interactivity"); read with the first device.
  setenv("AGX_RELAX_CDM_CTXSTORE_TIMEOUT", "1", 0);
  s.device = Own<id<MTLDevice>>(MTLCreateSystemDefaultDevice());
  if (!s.device) fail("this machine has no Metal device");
  if (![s.device.get() supportsFamily:MTLGPUFamilyApple7])
    fail("the kernels need an Apple GPU, an M1's or later: '" + name() + "' is none");
  s.queue = Own<id<MTLCommandQueue>>(given([s.device.get() newCommandQueue], "command queue"));
  const Own<id<MTLLibrary>> code = load_library(s.device.get(), library);
  for (const KernelRow& row : kernels)
    s.pipelines.emplace(row.name, make_pipeline(s.device.get(), code.get(), row));
  s.unused = alloc(16, "a placeholder");
}

MetalDevice::~MetalDevice() {
  const AutoreleasePool pool;
  state_->end_encoder();  // none may be released open
  state_.reset();         // Metal finishes what was committed, and its commands have references to what they use
}

std::string MetalDevice::name() const {
  const AutoreleasePool pool;
  return [[state_->device.get() name] UTF8String];
}

std::pair<size_t, size_t> MetalDevice::memory_info() const {
  const AutoreleasePool pool;
  const size_t total = size_t([state_->device.get() recommendedMaxWorkingSetSize]);
  const size_t used = size_t([state_->device.get() currentAllocatedSize]);
  return {total > used ? total - used : 0, total};
}

std::shared_ptr<void> MetalDevice::alloc(size_t bytes, const char* what) {
  const AutoreleasePool pool;
  State& s = *state_;
  bytes = bytes < 16 ? 16 : bytes;
  const size_t limit = size_t([s.device.get() maxBufferLength]);
  if (bytes > limit)
    fail(std::string(what) + ": " + std::to_string(bytes) + " bytes, Metal allows " + std::to_string(limit) +
         " in one buffer");
  // More would fail only when the commands that use it run, or make the machine swap.
  const auto [free, total] = memory_info();
  if (bytes > free)
    fail(std::string(what) + ": " + std::to_string(bytes) + " bytes, but of the " + std::to_string(total) +
         " that Metal recommends for all " + std::to_string(free) + " are left");
  Own<id<MTLBuffer>> buffer([s.device.get() newBufferWithLength:bytes options:MTLResourceStorageModeShared]);
  if (!buffer) fail(std::string(what) + ": Metal has no " + std::to_string(bytes) + " bytes");
  void* const data = [buffer.get() contents];
  s.buffers.emplace(uintptr_t(data), std::move(buffer));
  // Commands that still use it have references of their own.
  return std::shared_ptr<void>(data, [weak = std::weak_ptr<State>(state_)](void* p) {
    const AutoreleasePool drained;
    if (const auto state = weak.lock()) state->buffers.erase(uintptr_t(p));
  });
}

void MetalDevice::encode(const std::string& kernel, GridSize groups, int threads, const void* args, size_t args_bytes,
                         std::initializer_list<const void*> buffers, size_t threadgroup_bytes) {
  if (groups.x * groups.y * groups.z == 0) return;
  const AutoreleasePool pool;
  State& s = *state_;
  const auto found = s.pipelines.find(kernel);
  if (found == s.pipelines.end()) throw std::logic_error("the table of pipelines has no '" + kernel + "'");
  const id<MTLComputePipelineState> pipeline = found->second.get();
  s.begin_commands();
  if (!s.encoder)
    s.encoder = Own<id<MTLComputeCommandEncoder>>::retained(
        given([s.commands.get() computeCommandEncoder], "command encoder"));
  const id<MTLComputeCommandEncoder> encoder = s.encoder.get();
  [encoder setComputePipelineState:pipeline];
  [encoder setBytes:args length:args_bytes atIndex:0];
  NSUInteger index = 1;
  for (const void* data : buffers) {
    const auto [buffer, offset] = s.find(data ? data : s.unused.get());
    [encoder setBuffer:buffer offset:offset atIndex:index++];
  }
  if (threadgroup_bytes > 0) [encoder setThreadgroupMemoryLength:(threadgroup_bytes + 15) / 16 * 16 atIndex:0];
  [encoder dispatchThreadgroups:MTLSizeMake(NSUInteger(groups.x), NSUInteger(groups.y), NSUInteger(groups.z))
          threadsPerThreadgroup:MTLSizeMake(NSUInteger(threads), 1, 1)];
  if (++s.num_dispatches >= kMostDispatches) commit();
}

void MetalDevice::matmul_f16(float* out, int64_t out_stride, const void* x, const void* w, int64_t m, int64_t n,
                             int64_t k) {
  const AutoreleasePool pool;
  State& s = *state_;
  const auto matrix = [&](const void* data, int64_t rows, int64_t cols, int64_t row_bytes, MPSDataType type) {
    const auto [buffer, offset] = s.find(data);
    MPSMatrixDescriptor* const descriptor = [MPSMatrixDescriptor matrixDescriptorWithRows:NSUInteger(rows)
                                                                                  columns:NSUInteger(cols)
                                                                                 rowBytes:NSUInteger(row_bytes)
                                                                                 dataType:type];
    return Own<MPSMatrix*>(
        given([[MPSMatrix alloc] initWithBuffer:buffer offset:offset descriptor:descriptor], "matrix"));
  };
  const auto left = matrix(x, m, k, 2 * k, MPSDataTypeFloat16), right = matrix(w, n, k, 2 * k, MPSDataTypeFloat16);
  const auto result = matrix(out, m, n, 4 * out_stride, MPSDataTypeFloat32);
  const Own<MPSMatrixMultiplication*> product(given([[MPSMatrixMultiplication alloc] initWithDevice:s.device.get()
                                                                                      transposeLeft:NO
                                                                                     transposeRight:YES
                                                                                         resultRows:NSUInteger(m)
                                                                                      resultColumns:NSUInteger(n)
                                                                                    interiorColumns:NSUInteger(k)
                                                                                              alpha:1.0
                                                                                               beta:0.0],
                                                    "matrix product"));
  s.begin_commands();
  s.end_encoder();  // MPS opens one of its own
  [product.get() encodeToCommandBuffer:s.commands.get()
                            leftMatrix:left.get()
                           rightMatrix:right.get()
                          resultMatrix:result.get()];
}

void MetalDevice::commit() {
  State& s = *state_;
  if (!s.commands) return;
  const AutoreleasePool pool;
  s.end_encoder();
  [s.commands.get() commit];
  s.num_dispatches = 0;
  s.committed.push_back(std::move(s.commands));
}

void MetalDevice::synchronize() {
  commit();
  const AutoreleasePool pool;
  const std::vector<Own<id<MTLCommandBuffer>>> waited = std::move(state_->committed);
  for (const auto& commands : waited) [commands.get() waitUntilCompleted];
  for (const auto& commands : waited)
    if ([commands.get() status] == MTLCommandBufferStatusError) fail("Metal failed", [commands.get() error]);
}

}  // namespace rvllm
