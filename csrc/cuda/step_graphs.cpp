#include "cuda/step_graphs.h"

#include <cstring>

namespace rvllm::cuda {

namespace {
constexpr size_t kMaxGraphs = 128;  // shapes of steps that are kept
constexpr size_t kLeastWork = 8;    // operations; fewer are not worth a graph
}  // namespace

void Signature::add(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  add(uint64_t(bits));
}

void StepGraphs::add(uint64_t signature, std::function<void()> work) {
  if (!is_noting_) return work();
  signature_.add(signature);
  work_.push_back(std::move(work));
}

void StepGraphs::run() {
  for (const auto& work : work_) work();
}

cudaGraphExec_t StepGraphs::capture() {
  check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "beginning a graph");
  cudaGraph_t graph = nullptr;
  try {
    run();
  } catch (...) {
    cudaStreamEndCapture(stream_, &graph);
    if (graph) cudaGraphDestroy(graph);
    cudaGetLastError();
    throw;
  }
  check_cuda(cudaStreamEndCapture(stream_, &graph), "ending a graph");
  cudaGraphExec_t executable = nullptr;
  const cudaError_t error = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  check_cuda(error, "making a graph ready");
  return executable;
}

void StepGraphs::flush() {
  if (work_.empty()) return;
  const struct Clear {
    StepGraphs& graphs;
    ~Clear() {
      graphs.work_.clear();
      graphs.signature_ = Signature();
    }
  } clear{*this};
  if (work_.size() < kLeastWork) return run();
  const auto [found, is_new] = entries_.try_emplace(signature_.value());
  Entry& entry = found->second;
  if (is_new) {
    ages_.push_front(found->first);
    entry.age = ages_.begin();
    if (entries_.size() > kMaxGraphs) {
      const auto oldest = entries_.find(ages_.back());
      if (oldest->second.graph) {
        check_cuda(cudaStreamSynchronize(stream_), "waiting for a graph");
        cudaGraphExecDestroy(oldest->second.graph);
      }
      entries_.erase(oldest);
      ages_.pop_back();
    }
    return run();
  }
  ages_.splice(ages_.begin(), ages_, entry.age);
  if (!entry.graph) entry.graph = capture();
  check_cuda(cudaGraphLaunch(entry.graph, stream_), "launching a graph");
  ++num_replayed_;
}

void StepGraphs::forget() {
  cudaStreamSynchronize(stream_);
  for (const auto& [signature, entry] : entries_)
    if (entry.graph) cudaGraphExecDestroy(entry.graph);
  entries_.clear();
  ages_.clear();
}

}  // namespace rvllm::cuda
