#include "run/direct_read.h"

#include "cut/cut.h"
#include "cut/graph.h"
#include "device/capture.h"
#include "ir/host_cost.h"
#include "loops/call_trace.h"
#include "run/in_flight.h"
#include "run/op_by_op.h"
#include "tensor/tensor_impl.h"

namespace torch_xla {

using at::Tensor;

namespace {

// Whether nothing is to be cut, waited for or told before a value of the device is read.
bool nothing_before(c10::DeviceIndex device) {
  auto& in_flight = InFlight::of(device);
  if (!knows_values(device) || !in_flight.operator_run().is_none() || !in_flight.failures.empty() ||
      !in_flight.idle()) {
    return false;
  }
  const RecorderLock lock;
  return call_trace_of(device).ends().empty();
}

// Whether few operators make a value that is pending: looked at before anything is cut.
bool is_small(const Tensor& tensor) {
  const RecorderLock lock;
  const auto value = impl_of(tensor)->alias.current();
  return !value.node->leaf() && few_make(value, 2 * kHostGraph.operators);
}

bool compute(const Tensor& tensor) {
  auto graph = Cut::of_tensors({tensor}, Cut::Scope::kLive, Cut::Donate::kNothing).graph();
  try {
    if (!graph.outputs.empty() && graph.fits_host()) {
      // Without rules: what needs one is left. No signal handler runs in it, which could cut the graph again.
      OpByOpRun(graph, py::none(), std::nullopt).finish();
      return true;
    }
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) {
      throw;
    }
  } catch (const std::exception&) {  // it is raised again where it can be told
  }
  return false;
}

}  // namespace

std::optional<std::pair<Tensor, bool>> read_directly(const Tensor& tensor) {
  if (!is_xla(tensor) || !nothing_before(tensor.device().index())) {
    return {};
  }
  auto values = copy_on_host(tensor);
  const bool computes = !values && is_small(tensor) && compute(tensor);
  if (computes) {
    values = copy_on_host(tensor);
  }
  return values ? std::make_optional(std::make_pair(std::move(*values), computes)) : std::nullopt;
}

}  // namespace torch_xla
