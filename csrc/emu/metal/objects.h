// Objects of the emulated Metal, as its files share them.
#pragma once

#import <Metal/Metal.h>

#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "emu/metal/kernel_registry.h"

namespace rvllm::emu {

NSError* make_error(const std::string& text);
// Ends the process, as Metal's validation does, when a rule of the API is broken.
void require(bool ok, const char* rule);
// Whether Metal gives none of these now: RVLLM_EMU_REFUSED names one.
bool is_refused(const char* object);
// Any call of Metal may autorelease objects of its own, which only a pool frees.
void require_pool();

}  // namespace rvllm::emu

@interface EmulatedBuffer : NSObject <MTLBuffer> {
 @public
  char* data_;
  size_t bytes_;
  void* pages_;
  size_t page_bytes_;
}
@end

@interface EmulatedPipeline : NSObject <MTLComputePipelineState> {
 @public
  std::string* name_;
  int constants_[8];
}
@end

// Work is done when it is committed, or, with RVLLM_EMU_LAZY=1, when it is waited for or nobody holds it any more.
@interface EmulatedCommandBuffer : NSObject <MTLCommandBuffer> {
 @public
  std::vector<std::function<std::string()>>* work_;  // each says why it failed, or nothing
  std::vector<id>* used_;
  id encoder_;  // that is open
  MTLCommandBufferStatus status_;
  bool is_waited_for_;
  NSError* error_;
}
- (void)use:(id)object;
- (void)add:(std::function<std::string()>)work;
@end
