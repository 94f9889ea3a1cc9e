// Foundation for tests: reference counts, pools and strings. Objects that live are counted.
#import <Foundation/Foundation.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "emu/metal/objects.h"

namespace {
std::vector<NSAutoreleasePool*>& pools() {
  thread_local std::vector<NSAutoreleasePool*> stack;
  return stack;
}
long g_live = 0;
}  // namespace

extern "C" __attribute__((visibility("default"))) long rv_emu_live_objects() { return g_live; }

@implementation NSObject
+ (instancetype)alloc {
  ++g_live;
  NSObject* object = class_createInstance(self, 0);
  object->references_ = 1;
  return object;
}
- (instancetype)init {
  return self;
}
- (id)retain {
  ++references_;
  return self;
}
- (oneway void)release {
  rvllm::emu::require(references_ > 0, "an object is released once too often");
  if (--references_ == 0) [self dealloc];
}
- (id)autorelease {
  rvllm::emu::require(!pools().empty(), "an object is autoreleased without a pool, and never freed");
  static_cast<std::vector<id>*>(pools().back()->objects_)->push_back(self);
  return self;
}
- (void)dealloc {
  --g_live;
  object_dispose(self);
}
@end

@implementation NSAutoreleasePool
- (instancetype)init {
  objects_ = new std::vector<id>;
  pools().push_back(self);
  return self;
}
- (void)drain {
  auto* const objects = static_cast<std::vector<id>*>(objects_);
  for (size_t i = 0; i < objects->size(); ++i) [(*objects)[i] release];
  delete objects;
  rvllm::emu::require(pools().back() == self, "pools are drained out of order");
  pools().pop_back();
  [self release];
}
@end

@implementation NSString
+ (instancetype)stringWithUTF8String:(const char*)text {
  NSString* const string = [[NSString alloc] init];
  string->text_ = strdup(text);
  return [string autorelease];
}
- (const char*)UTF8String {
  return text_;
}
- (void)dealloc {
  free(text_);
  [super dealloc];
}
@end

@implementation NSError
- (NSString*)localizedDescription {
  return text_;
}
- (void)dealloc {
  [text_ release];
  [super dealloc];
}
@end

@implementation NSURL
+ (NSURL*)fileURLWithPath:(NSString*)path {
  NSURL* const url = [[NSURL alloc] init];
  url->path_ = [path retain];
  return [url autorelease];
}
- (void)dealloc {
  [path_ release];
  [super dealloc];
}
@end

namespace rvllm::emu {

NSError* make_error(const std::string& text) {
  NSError* const error = [[NSError alloc] init];
  error->text_ = [[NSString stringWithUTF8String:text.c_str()] retain];
  return [error autorelease];
}

void require(bool ok, const char* rule) {
  if (ok) return;
  std::fprintf(stderr, "Metal emulator: %s\n", rule);
  std::abort();
}

bool is_refused(const char* object) {
  const char* const refused = std::getenv("RVLLM_EMU_REFUSED");
  return refused && std::strcmp(refused, object) == 0;
}

void require_pool() { require(!pools().empty(), "a call without an autorelease pool"); }

}  // namespace rvllm::emu
