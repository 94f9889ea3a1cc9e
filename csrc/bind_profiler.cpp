#include "bind_profiler.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstring>

#include "profiler.h"

namespace py = pybind11;

namespace rvllm {
namespace {

// (int64 [n, 3] of operation, start, stop; number of slices that were not kept).
std::pair<py::array_t<int64_t>, int64_t> slices(const TimeLog& log) {
  static_assert(sizeof(TimeSlice) == 3 * sizeof(int64_t));
  const std::vector<TimeSlice>& kept = log.slices();
  py::array_t<int64_t> out({py::ssize_t(kept.size()), py::ssize_t(3)});
  if (!kept.empty()) std::memcpy(out.mutable_data(), kept.data(), kept.size() * sizeof(TimeSlice));
  return {out, log.num_lost()};
}

}  // namespace

void bind_profiler(py::module_& m) {
  m.def("now_ns", &now_ns, "Nanoseconds of the profiler's clock.");

  py::class_<ProfiledBackend, Backend, std::shared_ptr<ProfiledBackend>>(m, "ProfiledBackend")
      .def(py::init<std::shared_ptr<Backend>>(), py::arg("backend"))
      .def("measure_ceilings",
           [](ProfiledBackend& backend) {
             const Ceilings ceilings = backend.measure_ceilings();
             return std::make_pair(ceilings.bytes_per_second, ceilings.macs_per_second);
           },
           py::call_guard<py::gil_scoped_release>(),
           "(bytes read from memory, int8 multiply-accumulates) a second that all threads together reach at best.")
      .def("reset", &ProfiledBackend::reset, "Forgets everything so far; as all of these, not during a step.")
      .def("reset_totals", &ProfiledBackend::reset_totals, "The same, but keeps the slices.")
      .def("rows",
           [](const ProfiledBackend& b) {
             py::list rows;
             for (const ProfileRow& r : b.rows())
               rows.append(py::make_tuple(r.name, r.calls, r.ns, r.bytes, r.macs, r.busy_ns));
             return rows;
           },
           "[(operation, calls, ns, bytes, multiply-accumulates, [busy ns of each thread]), ...]")
      .def("thread_slices",
           [](const ProfiledBackend& b) {
             py::list threads;
             for (const TimeLog& thread : b.recorder().threads) threads.append(slices(thread));
             return threads;
           },
           "The caller's operations, then for each other thread its work, each as int64 [n, 3] of the operation's "
           "index in rows, start and stop in ns, and the number of slices that were not kept.");
}

}  // namespace rvllm
