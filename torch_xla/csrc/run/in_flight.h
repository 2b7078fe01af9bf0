// The one owner of what runs on each device. Barriers, reads, stream queries, forks and the exit ask it. Under the
// GIL.
#pragma once
#include <torch/csrc/utils/pybind.h>

#include <deque>
#include <vector>

#include "run/op_by_op.h"

namespace torch_xla {

class InFlight {
 public:
  // Lives as long as the process: the interpreter ends before that.
  static InFlight& of(c10::DeviceIndex device);

  // The OpByOpRun under way, or None. It is over once its graph is empty: its results are attached, or it failed.
  py::object operator_run();
  // From here on whoever cuts something there finishes it first. Throws StaleGraph where somebody did before.
  void set_operator_run(py::object run);

  // Programs that were started and not waited for.
  size_t programs() const { return tokens_.size(); }
  void add_program(py::object token) { tokens_.push_back(std::move(token)); }
  // Waits until so many are left; raises what one that failed has to say.
  void wait_for_programs(size_t left);
  // Forgets them; whoever takes them waits.
  std::vector<py::object> take_programs();

  // Whether nothing is left to compute. It does not wait.
  bool idle();

  // What failed where it could not be raised, such as at a fork: for who asks next.
  py::list failures;

 private:
  explicit InFlight(c10::DeviceIndex device) : device_(device) {}
  const c10::DeviceIndex device_;
  py::object operator_run_;
  std::deque<py::object> tokens_;
};

// Steps the host may be ahead of the device: enough to hide tracing, few enough to bound memory.
constexpr size_t kMaxProgramsInFlight = 2;

// Waits for a token or a buffer; raises what it has to say.
void block_until_ready(const py::object& token);
// Tells the metrics that the host waited for a device.
void note_wait(double seconds);

}  // namespace torch_xla
