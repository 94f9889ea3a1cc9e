// Streams, events, copies and graphs. With RVLLM_EMU_LAZY=1 a stream's work runs only when something waits for it, so
// that a missing wait, or a buffer used again too early, shows in the results.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "emu/cuda/runtime_state.h"

namespace rvllm::emu {

using Work = std::function<cudaError_t()>;

struct Graph {
  std::vector<Work> nodes;
};

struct Stream {
  std::deque<Work> queue;
  std::unique_ptr<Graph> capture;
  bool invalidated = false;
  bool blocking = true;  // takes turns with the default stream
  int device = current_device();
};

// The state of an event outlives it in the queues that mention it.
struct EventState {
  Stream* stream = nullptr;
  uint64_t recorded = 0, reached = 0;
  std::chrono::steady_clock::time_point time;
};
struct Event {
  std::shared_ptr<EventState> state = std::make_shared<EventState>();
};

namespace {

Stream g_default;
std::vector<Stream*> g_streams{&g_default};

Stream* resolve(Stream* stream) { return stream ? stream : &g_default; }

void run(const Work& work) {
  if (failed_for_good()) return;
  const DeviceAccess access;
  remember(work());
}

bool run_next(Stream* stream) {
  if (stream->queue.empty()) return false;
  const Work work = std::move(stream->queue.front());
  stream->queue.pop_front();
  run(work);
  return true;
}

cudaError_t outcome() { return failed_for_good() ? cudaErrorLaunchFailure : cudaSuccess; }

cudaError_t finish(Stream* stream) {
  while (run_next(stream)) {
  }
  return outcome();
}

void reach(const std::shared_ptr<EventState>& event, uint64_t generation) {
  while (event->reached < generation && run_next(event->stream)) {
  }
}

// Makes what comes next on `stream` wait for what is now on `other`.
void wait_for(Stream* stream, Stream* other) {
  if (other->queue.empty()) return;
  const auto marker = std::make_shared<EventState>();
  marker->stream = other;
  other->queue.push_back([=] {
    marker->reached = 1;
    return cudaSuccess;
  });
  stream->queue.push_back([=] {
    reach(marker, 1);
    return cudaSuccess;
  });
}

void take_turns_with_default(Stream* stream) {
  if (stream != &g_default && stream->blocking) wait_for(stream, &g_default);
  if (stream == &g_default)
    for (Stream* other : g_streams)
      if (other != stream && other->blocking) wait_for(stream, other);
}

bool is_source_device(cudaMemcpyKind kind) {
  return kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
}
bool is_target_device(cudaMemcpyKind kind) {
  return kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
}

cudaError_t invalid_copy(const std::string& why) {
  set_report("a copy " + why);
  return remember(cudaErrorInvalidValue);
}

void copy_rows(char* to, size_t to_pitch, const char* from, size_t from_pitch, size_t width, size_t height) {
  for (size_t i = 0; i < height; ++i) std::memcpy(to + i * to_pitch, from + i * from_pitch, width);
}

}  // namespace

cudaError_t forbidden_in_capture(const char* what) {
  for (Stream* stream : g_streams) {
    if (!stream->capture) continue;
    stream->invalidated = true;
    set_report(std::string(what) + " while a stream is captured");
    return remember(cudaErrorStreamCaptureUnsupported);
  }
  return cudaSuccess;
}

int device_of(Stream* stream) { return stream ? stream->device : current_device(); }

cudaError_t enqueue(Stream* stream, Work work) {
  stream = resolve(stream);
  if (failed_for_good()) return cudaErrorLaunchFailure;
  if (stream->capture) {
    stream->capture->nodes.push_back(std::move(work));
    return cudaSuccess;
  }
  if (stream == &g_default)
    if (const cudaError_t error = forbidden_in_capture("work on the default stream")) return error;
  take_turns_with_default(stream);
  stream->queue.push_back(std::move(work));
  return setting("RVLLM_EMU_LAZY", 0) ? cudaSuccess : finish(stream);
}

}  // namespace rvllm::emu

using namespace rvllm::emu;

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  if (width == 0 || height == 0) return cudaSuccess;
  if (to_pitch < width || from_pitch < width) return invalid_copy("of rows that are wider than their pitch");
  const size_t to_bytes = to_pitch * (height - 1) + width, from_bytes = from_pitch * (height - 1) + width;
  bool to_device = is_target_device(kind), from_device = is_source_device(kind);
  if (kind == cudaMemcpyDefault) {
    to_device = on_device(to, 1);
    from_device = on_device(from, 1);
  }
  if (to_device ? !on_device(to, to_bytes) : on_device(to, 1))
    return invalid_copy("to where its kind or length does not allow");
  if (from_device ? !on_device(from, from_bytes) : on_device(from, 1))
    return invalid_copy("from where its kind or length does not allow");
  const bool pageable_source = !from_device && !pinned(from), pageable_target = !to_device && !pinned(to);
  if (pageable_source || pageable_target)
    if (const cudaError_t error = forbidden_in_capture("a copy of pageable host memory")) return error;
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
  if (pageable_source) {  // the runtime stages it before it returns
    std::vector<char> staged(width * height);
    copy_rows(staged.data(), width, source, from_pitch, width, height);
    return enqueue(stream, [=] {
      copy_rows(target, to_pitch, staged.data(), width, width, height);
      return cudaSuccess;
    });
  }
  const cudaError_t error = enqueue(stream, [=] {
    copy_rows(target, to_pitch, source, from_pitch, width, height);
    return cudaSuccess;
  });
  if (error == cudaSuccess && pageable_target) return cudaStreamSynchronize(stream);  // as the runtime does
  return error;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, stream);
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return error != cudaSuccess ? error : cudaStreamSynchronize(nullptr);
}

cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  if (!on_device(data, bytes)) return invalid_copy("(memset) outside an allocation of device memory");
  return enqueue(stream, [=] {
    std::memset(data, value, bytes);
    return cudaSuccess;
  });
}

cudaError_t cudaMemset(void* data, int value, size_t bytes) { return cudaMemsetAsync(data, value, bytes, nullptr); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  *stream = new Stream;
  (*stream)->blocking = !(flags & cudaStreamNonBlocking);
  g_streams.push_back(*stream);
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const auto it = std::find(g_streams.begin(), g_streams.end(), stream);
  if (it == g_streams.end() || stream == &g_default) return remember(cudaErrorInvalidResourceHandle);
  finish(stream);
  g_streams.erase(it);
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  if (const cudaError_t error = forbidden_in_capture("cudaDeviceSynchronize")) return error;
  for (Stream* stream : g_streams) finish(stream);
  return outcome();
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (!stream) return cudaDeviceSynchronize();
  if (const cudaError_t error = forbidden_in_capture("cudaStreamSynchronize")) return error;
  return finish(stream);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new Event;
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const std::shared_ptr<EventState> state = event->state;
  state->stream = resolve(stream);
  const uint64_t generation = ++state->recorded;
  return enqueue(stream, [=] {
    state->reached = std::max(state->reached, generation);
    state->time = std::chrono::steady_clock::now();
    return cudaSuccess;
  });
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return event->state->reached == event->state->recorded ? outcome() : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (const cudaError_t error = forbidden_in_capture("cudaEventSynchronize")) return error;
  reach(event->state, event->state->recorded);
  return outcome();
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const std::shared_ptr<EventState> state = event->state;
  const uint64_t generation = state->recorded;
  if (generation == 0) return cudaSuccess;
  return enqueue(stream, [=] {
    reach(state, generation);
    return cudaSuccess;
  });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t stop) {
  if (start->state->recorded == 0 || stop->state->recorded == 0) return remember(cudaErrorInvalidResourceHandle);
  if (cudaEventQuery(start) == cudaErrorNotReady || cudaEventQuery(stop) == cudaErrorNotReady) return cudaErrorNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(stop->state->time - start->state->time).count();
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (!stream || stream->capture) return remember(cudaErrorStreamCaptureUnsupported);
  stream->capture = std::make_unique<Graph>();
  stream->invalidated = false;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  if (!stream || !stream->capture) return remember(cudaErrorInvalidValue);
  const std::unique_ptr<Graph> captured = std::move(stream->capture);
  if (stream->invalidated) return remember(cudaErrorStreamCaptureInvalidated);
  *graph = new Graph(*captured);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = new Graph(*graph);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  for (const Work& node : executable->nodes)
    if (const cudaError_t error = enqueue(stream, node)) return error;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}
