// What the Metal backend uses of Metal Performance Shaders, as Metal.h.
#pragma once

#import <Metal/Metal.h>

typedef uint32_t MPSDataType;
enum { MPSDataTypeFloat32 = 0x10000000 | 32, MPSDataTypeFloat16 = 0x10000000 | 16 };

@interface MPSMatrixDescriptor : NSObject {
 @public
  NSUInteger rows_, columns_, row_bytes_;
  MPSDataType type_;
}
+ (instancetype)matrixDescriptorWithRows:(NSUInteger)rows
                                 columns:(NSUInteger)columns
                                rowBytes:(NSUInteger)rowBytes
                                dataType:(MPSDataType)dataType;
@end

@interface MPSMatrix : NSObject {
 @public
  id<MTLBuffer> buffer_;
  NSUInteger offset_;
  MPSMatrixDescriptor* descriptor_;
}
- (instancetype)initWithBuffer:(id<MTLBuffer>)buffer
                        offset:(NSUInteger)offset
                    descriptor:(MPSMatrixDescriptor*)descriptor;
@end

@interface MPSMatrixMultiplication : NSObject {
 @public
  BOOL transpose_left_, transpose_right_;
  NSUInteger rows_, columns_, interior_;
  double alpha_, beta_;
}
- (instancetype)initWithDevice:(id<MTLDevice>)device
                 transposeLeft:(BOOL)transposeLeft
                transposeRight:(BOOL)transposeRight
                    resultRows:(NSUInteger)resultRows
                 resultColumns:(NSUInteger)resultColumns
               interiorColumns:(NSUInteger)interiorColumns
                         alpha:(double)alpha
                          beta:(double)beta;
- (void)encodeToCommandBuffer:(id<MTLCommandBuffer>)commandBuffer
                   leftMatrix:(MPSMatrix*)leftMatrix
                  rightMatrix:(MPSMatrix*)rightMatrix
                 resultMatrix:(MPSMatrix*)resultMatrix;
@end
