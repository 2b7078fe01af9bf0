#include "base/kernel_settings.h"
#include "base/metric.h"
#include "base/python_hooks.h"
#include "base/user_line.h"
#include "bindings/bindings.h"
#include "bindings/describe.h"
#include "cut/scalar_layout.h"
#include "device/device.h"
#include "device/random.h"
#include "ir/op_info.h"
#include "record/meta_cache.h"
#include "record/record.h"
#include "record/unboxed.h"
#include "tensor/storage.h"

namespace torch_xla {

namespace {

c10::DeviceIndex checked_index(int index) {
  TORCH_CHECK(0 <= index && index < static_cast<int>(kMaxDevices), "[device] got device index ", index,
              ", expected 0 to ", kMaxDevices - 1);
  return static_cast<c10::DeviceIndex>(index);
}

void check_count(int count) {
  TORCH_CHECK(0 < count && count <= static_cast<int>(kMaxDevices), "[device] got ", count, " devices, expected 1 to ",
              kMaxDevices, ", as many as PyTorch can count; hide the others from this process");
}

}  // namespace

void bind_recorder(py::module_& m) {
  m.def("set_python_hooks", [](const py::object& hooks) { set_python_hooks(hooks.ptr()); });
  m.def("set_eager", &set_eager);
  m.def("suspend_eager", &suspend_eager);
  m.def("is_eager", &eager);
  m.def("set_special_numbers", &set_special_numbers);
  m.def("set_all_numbers_constant", &set_all_numbers_constant);
  m.def("set_wide_numbers", [](bool floats, bool integers) { wide_floats = floats, wide_integers = integers; });
  m.def("number_types", &number_types);
  m.def("call_settings", &call_settings);
  m.def("default_dtype", &default_dtype);
  m.def("set_frame_depth", &set_frame_depth);
  m.def("set_scope", &set_scope);
  m.def("user_frame", &user_frame);
  m.def("thread_position", [](unsigned long thread) {
    const auto [line, loading] = thread_position(thread);
    return py::make_tuple(line, loading);
  });
  m.def("add_skipped_prefix", &add_skipped_prefix);
  m.def("record_undecomposed", &record_undecomposed);
  m.def("keep_on_host", &keep_on_host);
  m.def("check_errors", &check_errors);
  m.def("refuse_packing", &refuse_packing);
  m.def("unboxed_kernels", &unboxed_kernels);
  m.def("op_counts", &op_counts);
  m.def(
      "add_sample", [](std::string_view name, double value, std::string_view unit) { metric(name).add(value, unit); },
      py::arg("name"), py::arg("value"), py::arg("unit") = "seconds");
  m.def("metric", [](std::string_view name) -> py::object {
    const auto snapshot = snapshot_of(name);
    if (!snapshot) {
      return py::none();
    }
    return py::make_tuple(snapshot->unit, snapshot->count, snapshot->total, snapshot->samples, snapshot->every);
  });
  m.def("metric_names", &metric_names);
  m.def("clear_metrics", &clear_metrics);
  m.def("shape_cache_misses", &shape_cache_misses);
  m.def("set_device_count", [](int n) {
    check_count(n);
    set_device_count(static_cast<c10::DeviceIndex>(n));
  });
  m.def("set_own_index", &set_own_index);
  m.def("known_index", &known_index);
  m.def("set_spans_mesh", &set_spans_mesh);
  m.def("device_count", &device_count);
  m.def("current_device", &current_device);
  m.def("set_current_device", [](int i) { set_current_device(checked_index(i)); });
  m.def("rng_state", [](int device) { return random_state(checked_index(device)); });
  m.def("set_rng_state",
        [](int device, uint64_t seed, uint64_t offset) { set_random_state(checked_index(device), seed, offset); });
}

}  // namespace torch_xla
