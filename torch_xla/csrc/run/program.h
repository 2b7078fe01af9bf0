// Running: input buffers in, results attached.
#pragma once
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "cut/graph.h"
#include "cut/packing.h"

namespace torch_xla {

// What a run needs to know of a compiled graph, and all that `Arguments` must agree with.
class Program {
 public:
  Program(Graph& graph, bool waits);

  // A tensor that it takes or gives.
  struct Type {
    Hash value;  // shape and dtype
    uint32_t placement = 0;
    bool operator==(const Type& other) const {
      return value == other.value &&
             (placement == other.placement || (is_replicated(placement) && is_replicated(other.placement)));
    }
  };

  const Hash key;
  const c10::DeviceIndex device;
  const Packing packing;
  const std::shared_ptr<const ScalarLayout> scalar_layout;
  const Vector<int32_t> aliased_outputs;  // as the graph's
  Vector<Type> inputs;
  Vector<Type> outputs;
  const bool waits;    // for a run before its results count, because a host callback in it can fail
  py::object starter;  // makes `run`
  // Notes a start in which other processes take part; gives a function to be called with the results, the token last.
  py::object on_start;

  // Sets the placements of its inputs and outputs, as the compiler chose them.
  void set_placements(const std::vector<uint32_t>& in, const std::vector<uint32_t>& out);

  // Leaves that a number fills, and that may be anywhere, are to be where it takes them.
  void place_fills(const Arguments& arguments) const;
  // What starts it, as dispatch.py tells.
  const py::object& run();
  // Has that made anew: the first is of no use any more where JAX could not be told how to start the program.
  void renew() { run_ = {}; }

  // The buffers of a run's numbers; those of the latest run, where the numbers did not change.
  std::vector<py::object> number_buffers(const Arguments& arguments);

 private:
  NumberVectors vectors_;               // of the latest run
  std::array<py::object, 4> uploaded_;  // their buffers
  py::object run_;
};

// A vector of numbers, of one type, as NumPy's.
py::object number_array(size_t type, const std::string& bytes);

// Starts a program on its arguments and gives its results to their tensors, without waiting for them unless it `waits`.
// Returns the token of the run.
py::object execute(Arguments& arguments, Program& program);

// Whether this thread runs a single operation of eager mode: those are measured by themselves.
bool in_eager_operation();
void set_eager_operation(bool on);

}  // namespace torch_xla
