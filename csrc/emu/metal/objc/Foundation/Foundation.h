// What the Metal backend uses of Foundation: declarations as in Apple's documentation, for clang on other systems.
#pragma once

#import <objc/objc.h>
#import <objc/runtime.h>
#include <stddef.h>
#include <stdint.h>

typedef unsigned long NSUInteger;
typedef long NSInteger;

@protocol NSObject
- (id)retain;
- (oneway void)release;
- (id)autorelease;
@end

__attribute__((objc_root_class))
@interface NSObject <NSObject> {
  Class isa;
  long references_;
}
+ (instancetype)alloc;
- (instancetype)init;
- (void)dealloc;
@end

@interface NSString : NSObject {
 @public
  char* text_;
}
+ (instancetype)stringWithUTF8String:(const char*)text;
- (const char*)UTF8String;
@end

@interface NSError : NSObject {
 @public
  NSString* text_;
}
@property(readonly, copy) NSString* localizedDescription;
@end

@interface NSURL : NSObject {
 @public
  NSString* path_;
}
+ (NSURL*)fileURLWithPath:(NSString*)path;
@end

@interface NSAutoreleasePool : NSObject {
 @public
  void* objects_;
  NSAutoreleasePool* outer_;
}
- (void)drain;
@end
