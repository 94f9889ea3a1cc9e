// A Metal device for tests: buffers that end at an unreadable page with RVLLM_EMU_GUARD=1, and the kernels that were
// compiled into this module as its library. RVLLM_EMU_NO_DEVICE=1 is a machine without one, RVLLM_EMU_OLD_DEVICE=1 one
// with a GPU that is not Apple's, and RVLLM_EMU_THREADS the most threads that a group may have. Without an attribute
// that asks for more a kernel gets 256: how many a GPU gives depends on the registers that it takes.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "emu/metal/objects.h"
#include "emu/shared_memory.h"

extern "C" {
__attribute__((weak)) void __asan_poison_memory_region(const volatile void* data, size_t bytes);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void* data, size_t bytes);
}

using rvllm::emu::is_refused;
using rvllm::emu::make_error;
using rvllm::emu::require;
using rvllm::emu::require_pool;

namespace {

bool setting(const char* name) {
  const char* const value = getenv(name);
  return value && atoi(value) != 0;
}

constexpr size_t kPage = 4096;

size_t device_bytes() {  // RVLLM_EMU_MEMORY: in MiB
  const char* const value = getenv("RVLLM_EMU_MEMORY");
  return size_t(value ? atoi(value) : 8192) << 20;
}

size_t g_allocated = 0;

}  // namespace

@implementation EmulatedBuffer
- (void*)contents {
  return data_;
}
- (NSUInteger)length {
  return bytes_;
}
- (void)dealloc {
  require_pool();
  g_allocated -= bytes_;
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(pages_, page_bytes_);
  munmap(pages_, page_bytes_);
  [super dealloc];
}
@end

@implementation EmulatedPipeline
- (NSUInteger)maxTotalThreadsPerThreadgroup {
  const char* const most = getenv("RVLLM_EMU_THREADS");
  return std::min(most ? NSUInteger(atoi(most)) : 1024, NSUInteger(rvllm::emu::most_threads(*name_)));
}
- (NSUInteger)threadExecutionWidth {
  return 32;
}
- (void)dealloc {
  delete name_;
  [super dealloc];
}
@end

@implementation MTLCompileOptions
- (instancetype)init {
  fast_ = YES;
  return self;
}
- (void)setFastMathEnabled:(BOOL)enabled {
  fast_ = enabled;
}
@end

@implementation MTLFunctionConstantValues
- (instancetype)init {
  for (int& value : values_) value = -1;
  return self;
}
- (void)setConstantValue:(const void*)value type:(MTLDataType)type atIndex:(NSUInteger)index {
  require(type == MTLDataTypeBool && index < 8, "function constants here are booleans below 8");
  values_[index] = *static_cast<const bool*>(value);
}
@end

@interface EmulatedFunction : NSObject <MTLFunction> {
 @public
  NSString* name_;
  int constants_[8];
}
@end
@implementation EmulatedFunction
- (NSString*)name {
  return name_;
}
- (void)dealloc {
  [name_ release];
  [super dealloc];
}
@end

@interface EmulatedLibrary : NSObject <MTLLibrary>
@end
@implementation EmulatedLibrary
- (id<MTLFunction>)newFunctionWithName:(NSString*)name {
  if (rvllm::emu::uses_constants([name UTF8String])) return nil;  // Metal makes none without their values
  MTLFunctionConstantValues* const none = [[MTLFunctionConstantValues alloc] init];
  const id<MTLFunction> function = [self newFunctionWithName:name constantValues:none error:nullptr];
  [none release];
  return function;
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)name
                        constantValues:(MTLFunctionConstantValues*)values
                                 error:(NSError**)error {
  if (!rvllm::emu::has_kernel([name UTF8String])) {
    if (error) *error = make_error("no such function");
    return nil;
  }
  EmulatedFunction* const function = [[EmulatedFunction alloc] init];
  function->name_ = [name retain];
  memcpy(function->constants_, values->values_, sizeof values->values_);
  return function;
}
@end

@interface EmulatedQueue : NSObject <MTLCommandQueue>
@end
@implementation EmulatedQueue
- (id<MTLCommandBuffer>)commandBuffer {
  if (is_refused("command buffer")) return nil;
  return [[[EmulatedCommandBuffer alloc] init] autorelease];
}
@end

@interface EmulatedDevice : NSObject <MTLDevice>
@end
@implementation EmulatedDevice
- (NSString*)name {
  return [NSString stringWithUTF8String:"CPU emulator"];
}
- (uint64_t)recommendedMaxWorkingSetSize {
  require_pool();
  return device_bytes();
}
- (NSUInteger)currentAllocatedSize {
  require_pool();
  return g_allocated;
}
- (NSUInteger)maxBufferLength {
  require_pool();
  return device_bytes() / 2;
}
- (BOOL)supportsFamily:(MTLGPUFamily)family {
  return family == MTLGPUFamilyApple7 && !setting("RVLLM_EMU_OLD_DEVICE");
}
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options {
  require_pool();
  require(length > 0 && options == MTLResourceStorageModeShared, "a buffer needs a length and shared storage");
  EmulatedBuffer* const buffer = [[EmulatedBuffer alloc] init];
  const size_t used = (length + kPage - 1) / kPage * kPage;
  buffer->bytes_ = length;
  buffer->page_bytes_ = used + kPage;
  buffer->pages_ =
      mmap(nullptr, buffer->page_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  require(buffer->pages_ != MAP_FAILED, "out of memory");
  char* const pages = static_cast<char*>(buffer->pages_);
  mprotect(pages + used, kPage, PROT_NONE);
  buffer->data_ = setting("RVLLM_EMU_GUARD") ? pages + (used - (length + 15) / 16 * 16) : pages;
  rvllm::emu::fill_invalid(buffer->data_, length);
  if (__asan_poison_memory_region)
    __asan_poison_memory_region(buffer->data_ + length, size_t(pages + used - buffer->data_) - length);
  g_allocated += length;
  return buffer;
}
- (id<MTLCommandQueue>)newCommandQueue {
  require_pool();
  return is_refused("command queue") ? nil : [[EmulatedQueue alloc] init];
}
- (id<MTLLibrary>)newLibraryWithSource:(NSString*)source options:(MTLCompileOptions*)options error:(NSError**)error {
  require(options && !options->fast_, "the kernels are compiled without fast math");
  if (strstr([source UTF8String], "kernel void")) return [[EmulatedLibrary alloc] init];
  *error = make_error("no kernel in the source");
  return nil;
}
- (id<MTLLibrary>)newLibraryWithURL:(NSURL*)url error:(NSError**)error {
  if (FILE* const file = fopen([url->path_ UTF8String], "rb")) {
    fclose(file);
    return [[EmulatedLibrary alloc] init];
  }
  *error = make_error("no such file");
  return nil;
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function error:(NSError**)error {
  EmulatedPipeline* const pipeline = [[EmulatedPipeline alloc] init];
  EmulatedFunction* const of = (EmulatedFunction*)function;
  pipeline->name_ = new std::string([of->name_ UTF8String]);
  memcpy(pipeline->constants_, of->constants_, sizeof of->constants_);
  if (error) *error = nil;
  return pipeline;
}
@end

id<MTLDevice> MTLCreateSystemDefaultDevice(void) {
  return setting("RVLLM_EMU_NO_DEVICE") ? nil : [[EmulatedDevice alloc] init];
}
