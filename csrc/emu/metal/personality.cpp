// clang's Objective-C++ for the GNU runtime names the personality routine of Objective-C, which knows no C++ catch
// clauses: this one of the same name sends exceptions to that of C++.
#include <unwind.h>

extern "C" _Unwind_Reason_Code __gxx_personality_v0(int, _Unwind_Action, _Unwind_Exception_Class, _Unwind_Exception*,
                                                    _Unwind_Context*);
extern "C" __attribute__((visibility("default"))) _Unwind_Reason_Code
__gnu_objc_personality_v0(int version, _Unwind_Action actions, _Unwind_Exception_Class kind,
                          _Unwind_Exception* exception, _Unwind_Context* context) {
  return __gxx_personality_v0(version, actions, kind, exception, context);
}
