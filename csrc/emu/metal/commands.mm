// Command buffers, encoders and matrix products of the emulated Metal.
#import <MetalPerformanceShaders/MetalPerformanceShaders.h>

#include <cstdlib>
#include <cstring>

#include "emu/metal/objects.h"

using rvllm::emu::Bindings;
using rvllm::emu::is_refused;
using rvllm::emu::require;
using rvllm::emu::require_pool;

namespace {
constexpr NSUInteger kMaxIndex = rvllm::emu::kMaxBindings;
}

@interface EmulatedEncoder : NSObject <MTLComputeCommandEncoder> {
 @public
  EmulatedCommandBuffer* commands_;
  EmulatedPipeline* pipeline_;
  EmulatedBuffer* buffers_[kMaxIndex];
  size_t offsets_[kMaxIndex];
  std::string* bytes_[kMaxIndex];
  size_t threadgroup_bytes_;
  bool has_ended_;
}
@end

@implementation EmulatedEncoder
- (void)setComputePipelineState:(id<MTLComputePipelineState>)pipeline {
  pipeline_ = (EmulatedPipeline*)pipeline;
  [commands_ use:pipeline_];
  // Metal keeps what was bound for the kernel before; a kernel that reads it has been given too little.
  for (NSUInteger i = 0; i < kMaxIndex; ++i) {
    buffers_[i] = nil;
    delete bytes_[i];
    bytes_[i] = nullptr;
  }
  threadgroup_bytes_ = 0;
}
- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index {
  require(index < kMaxIndex, "the index of a buffer is 31 or more");
  require(buffer && offset < [buffer length], "the offset is not in the buffer");
  require(offset % 4 == 0, "the offset is no multiple of 4");
  buffers_[index] = (EmulatedBuffer*)buffer;
  offsets_[index] = offset;
  [commands_ use:buffers_[index]];
}
- (void)setBytes:(const void*)bytes length:(NSUInteger)length atIndex:(NSUInteger)index {
  require(index < kMaxIndex && length > 0 && length <= 4096, "setBytes takes 1 to 4096 bytes");
  delete bytes_[index];
  bytes_[index] = new std::string(static_cast<const char*>(bytes), length);
  buffers_[index] = nil;
}
- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index {
  require(index == 0 && length % 16 == 0, "the length of threadgroup memory is no multiple of 16");
  threadgroup_bytes_ = length;
}
- (void)dispatchThreadgroups:(MTLSize)groups threadsPerThreadgroup:(MTLSize)threads {
  require(pipeline_ && !has_ended_, "a dispatch without a pipeline, or after endEncoding");
  require(threadgroup_bytes_ <= rvllm::emu::kMaxThreadgroupBytes, "more than 32 KiB of threadgroup memory");
  require(threads.width * threads.height * threads.depth <= [pipeline_ maxTotalThreadsPerThreadgroup],
          "more threads in a group than the pipeline allows");
  require(groups.width * groups.height * groups.depth > 0, "an empty grid");
  Bindings bindings;
  bindings.threadgroup_bytes = threadgroup_bytes_;
  memcpy(bindings.constants, pipeline_->constants_, sizeof bindings.constants);
  std::vector<std::string> bytes(kMaxIndex);
  for (NSUInteger i = 0; i < kMaxIndex; ++i) {
    if (buffers_[i])
      bindings.buffers[i] = {buffers_[i]->data_ + offsets_[i], buffers_[i]->bytes_ - offsets_[i]};
    else if (bytes_[i])
      bytes[i] = *bytes_[i];
  }
  const std::string name = *pipeline_->name_;
  [commands_ add:[=]() mutable {
    for (NSUInteger i = 0; i < kMaxIndex; ++i)
      if (!bytes[i].empty()) bindings.buffers[i] = {bytes[i].data(), bytes[i].size()};
    return rvllm::emu::dispatch_kernel(name, bindings,
                                       {unsigned(groups.width), unsigned(groups.height), unsigned(groups.depth)},
                                       {unsigned(threads.width), unsigned(threads.height), unsigned(threads.depth)});
  }];
}
- (void)endEncoding {
  has_ended_ = true;
  commands_->encoder_ = nil;
}
- (void)dealloc {
  require(has_ended_, "an encoder is released before endEncoding");
  for (std::string* bytes : bytes_) delete bytes;
  [super dealloc];
}
@end

@implementation EmulatedCommandBuffer
- (instancetype)init {
  work_ = new std::vector<std::function<std::string()>>;
  used_ = new std::vector<id>;
  return self;
}
- (void)use:(id)object {
  used_->push_back([object retain]);
}
- (void)add:(std::function<std::string()>)work {
  work_->push_back(std::move(work));
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoder {
  require(!encoder_ && status_ == MTLCommandBufferStatusNotEnqueued,
          "an encoder while another is open, or after commit");
  if (is_refused("command encoder")) return nil;
  EmulatedEncoder* const encoder = [[EmulatedEncoder alloc] init];
  encoder->commands_ = self;
  encoder_ = encoder;
  return [encoder autorelease];
}
- (void)run {
  status_ = MTLCommandBufferStatusCompleted;
  for (const auto& work : *work_) {
    const std::string failure = work();
    if (failure.empty()) continue;
    status_ = MTLCommandBufferStatusError;
    error_ = [rvllm::emu::make_error(failure) retain];
    break;
  }
}
- (void)commit {
  require_pool();
  require(!encoder_ && status_ == MTLCommandBufferStatusNotEnqueued, "a commit with an open encoder, or a second one");
  status_ = MTLCommandBufferStatusCommitted;
  const char* const lazy = getenv("RVLLM_EMU_LAZY");
  if (!lazy || atoi(lazy) == 0) [self run];
}
- (void)waitUntilCompleted {
  require_pool();
  require(status_ != MTLCommandBufferStatusNotEnqueued, "waiting for commands that were not committed");
  if (status_ == MTLCommandBufferStatusCommitted) [self run];
  is_waited_for_ = true;
}
- (MTLCommandBufferStatus)status {
  require_pool();
  require(is_waited_for_, "the status of commands that may still run");
  return status_;
}
- (NSError*)error {
  return error_;
}
- (void)dealloc {
  if (status_ == MTLCommandBufferStatusCommitted) [self run];  // with what it has references to, and nothing else
  for (id object : *used_) [object release];
  delete used_;
  delete work_;
  [error_ release];
  [super dealloc];
}
@end

@implementation MPSMatrixDescriptor
+ (instancetype)matrixDescriptorWithRows:(NSUInteger)rows
                                 columns:(NSUInteger)columns
                                rowBytes:(NSUInteger)rowBytes
                                dataType:(MPSDataType)dataType {
  MPSMatrixDescriptor* const descriptor = [[MPSMatrixDescriptor alloc] init];
  require(dataType == MPSDataTypeFloat32 || dataType == MPSDataTypeFloat16, "elements are float or half here");
  const NSUInteger element = dataType == MPSDataTypeFloat32 ? 4 : 2;
  require(rowBytes >= columns * element && rowBytes % element == 0, "the bytes of a row are fewer than its elements");
  descriptor->rows_ = rows;
  descriptor->columns_ = columns;
  descriptor->row_bytes_ = rowBytes;
  descriptor->type_ = dataType;
  return [descriptor autorelease];
}
@end

@implementation MPSMatrix
- (instancetype)initWithBuffer:(id<MTLBuffer>)buffer
                        offset:(NSUInteger)offset
                    descriptor:(MPSMatrixDescriptor*)descriptor {
  if (is_refused("matrix")) {
    [self release];
    return nil;
  }
  const NSUInteger element = descriptor->type_ == MPSDataTypeFloat32 ? 4 : 2;
  const NSUInteger bytes = (descriptor->rows_ - 1) * descriptor->row_bytes_ + descriptor->columns_ * element;
  require(offset + bytes <= [buffer length], "a matrix does not fit its buffer");
  buffer_ = [buffer retain];
  offset_ = offset;
  descriptor_ = [descriptor retain];
  return self;
}
- (void)dealloc {
  [buffer_ release];
  [descriptor_ release];
  [super dealloc];
}
@end

namespace {

struct MatrixView {
  char* data;
  size_t row_bytes;
  bool is_float, is_transposed;

  MatrixView(MPSMatrix* matrix, bool transposed)
      : data(static_cast<char*>([matrix->buffer_ contents]) + matrix->offset_),
        row_bytes(matrix->descriptor_->row_bytes_),
        is_float(matrix->descriptor_->type_ == MPSDataTypeFloat32),
        is_transposed(transposed) {}
  float at(size_t i, size_t j) const {
    if (is_transposed) std::swap(i, j);
    const char* const row = data + i * row_bytes;
    return is_float ? reinterpret_cast<const float*>(row)[j] : float(reinterpret_cast<const _Float16*>(row)[j]);
  }
};

NSUInteger rows_of(MPSMatrix* matrix, bool transposed) {
  return transposed ? matrix->descriptor_->columns_ : matrix->descriptor_->rows_;
}

}  // namespace

@implementation MPSMatrixMultiplication
- (instancetype)initWithDevice:(id<MTLDevice>)device
                 transposeLeft:(BOOL)transposeLeft
                transposeRight:(BOOL)transposeRight
                    resultRows:(NSUInteger)resultRows
                 resultColumns:(NSUInteger)resultColumns
               interiorColumns:(NSUInteger)interiorColumns
                         alpha:(double)alpha
                          beta:(double)beta {
  require(device != nil && beta == 0.0, "a product needs a device, and adds nothing here");
  if (is_refused("matrix product")) {
    [self release];
    return nil;
  }
  transpose_left_ = transposeLeft;
  transpose_right_ = transposeRight;
  rows_ = resultRows;
  columns_ = resultColumns;
  interior_ = interiorColumns;
  alpha_ = alpha;
  return self;
}
- (void)encodeToCommandBuffer:(id<MTLCommandBuffer>)commandBuffer
                   leftMatrix:(MPSMatrix*)leftMatrix
                  rightMatrix:(MPSMatrix*)rightMatrix
                 resultMatrix:(MPSMatrix*)resultMatrix {
  EmulatedCommandBuffer* const commands = (EmulatedCommandBuffer*)commandBuffer;
  require(!commands->encoder_, "a product is encoded while an encoder is open");
  require(rows_of(leftMatrix, transpose_left_) >= rows_ && rows_of(leftMatrix, !transpose_left_) >= interior_ &&
              rows_of(rightMatrix, transpose_right_) >= interior_ &&
              rows_of(rightMatrix, !transpose_right_) >= columns_ && rows_of(resultMatrix, false) >= rows_ &&
              rows_of(resultMatrix, true) >= columns_,
          "the shapes of matrices are not those of the product");
  require(resultMatrix->descriptor_->type_ == MPSDataTypeFloat32, "results are floats here");
  for (id object : {(id)leftMatrix, (id)rightMatrix, (id)resultMatrix}) [commands use:object];
  const MatrixView left(leftMatrix, transpose_left_), right(rightMatrix, transpose_right_), result(resultMatrix, false);
  const size_t rows = rows_, columns = columns_, interior = interior_;
  const double alpha = alpha_;
  [commands add:[=] {
    for (size_t i = 0; i < rows; ++i)
      for (size_t j = 0; j < columns; ++j) {
        float sum = 0.0f;
        for (size_t k = 0; k < interior; ++k) sum += left.at(i, k) * right.at(k, j);
        reinterpret_cast<float*>(result.data + i * result.row_bytes)[j] = float(alpha) * sum;
      }
    return std::string();
  }];
}
@end
