// Errors a caller can cause become exceptions with one clear line; internal invariants do not come here.
#pragma once

#include <sstream>
#include <stdexcept>

namespace rvllm {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

template <class... Parts>
void check(bool ok, const Parts&... parts) {
  if (!ok) fail(parts...);
}

}  // namespace rvllm
