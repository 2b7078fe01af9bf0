#include "run/program.h"

#include <pybind11/numpy.h>

#include "base/metric.h"
#include "base/python_hooks.h"
#include "device/device.h"
#include "run/in_flight.h"
#include "run/kernel_thread.h"

namespace torch_xla {

namespace {

thread_local bool eager_operation = false;

// For buffers of a kind it has not seen yet, JAX asks a Python function how to start the program, and that only tells
// it how (dispatch.py): in Python code an interrupt may be raised, which must not happen once donated inputs are gone.
py::tuple start(const py::object& run, const py::tuple& inputs, Arguments& arguments) {
  for (int attempt = 0; attempt < 2; ++attempt) {
    arguments.begin();
    auto results = py::reinterpret_steal<py::object>(PyObject_CallObject(run.ptr(), inputs.ptr()));
    if (!results) {
      throw py::error_already_set();
    }
    if (!results.is_none()) {
      return results;
    }
  }
  TORCH_CHECK(false, "[run] JAX did not start a program that it was told how to start; please report this");
}

// With several devices the client crashes where it finds that a buffer is gone.
void check_alive(const py::tuple& buffers) {
  static auto* const name = PyUnicode_InternFromString("is_deleted");
  for (size_t i = 0; i < buffers.size(); ++i) {
    const auto deleted = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(buffers[i].ptr(), name));
    if (!deleted) {
      throw py::error_already_set();
    }
    TORCH_CHECK(!deleted.is(py::bool_(true)), "[run] input ", i,
                " is gone: something outside torch_xla deleted it, or gave it to another program");
  }
}

}  // namespace

Program::Program(Graph& graph, bool waits)
    : key(graph.key),
      device(graph.device),
      packing(graph),
      scalar_layout(graph.scalar_layout()),
      aliased_outputs(graph.aliased_outputs),
      waits(waits) {
  for (const auto& leaf : graph.leaves) {
    inputs.push_back({leaf->meta(0).value, leaf->placement});
  }
  for (const auto& [node, index] : graph.outputs) {
    outputs.push_back({node->meta(index).value});
  }
}

void Program::set_placements(const std::vector<uint32_t>& in, const std::vector<uint32_t>& out) {
  TORCH_CHECK(in.size() == inputs.size() && out.size() == outputs.size(), "[run] got placements of ", in.size(),
              " inputs and ", out.size(), " outputs, expected ", inputs.size(), " and ", outputs.size());
  for (size_t i = 0; i < in.size(); ++i) {
    inputs[i].placement = in[i];
  }
  for (size_t i = 0; i < out.size(); ++i) {
    outputs[i].placement = out[i];
  }
}

void Program::place_fills(const Arguments& arguments) const {
  for (size_t i = 0; spans_mesh() && i < inputs.size(); ++i) {  // elsewhere there is one place
    auto& leaf = *arguments.leaves[i];
    if (leaf.is(Source::Kind::NumberFill) && leaf.placement == kUnspecified) {
      leaf.placement = inputs[i].placement;
    }
  }
}

const py::object& Program::run() {
  if (!run_) {
    run_ = starter();
  }
  return run_;
}

py::object number_array(size_t type, const std::string& bytes) {
  const py::dtype dtype(number_types().at(type));
  return py::array(dtype, static_cast<py::ssize_t>(bytes.size()) / dtype.itemsize(), bytes.data());
}

std::vector<py::object> Program::number_buffers(const Arguments& arguments) {
  const auto vectors = scalar_layout->pack(arguments.numbers);
  std::vector<py::object> buffers;
  for (size_t type = 0; type < vectors.size(); ++type) {
    if (vectors[type].empty()) {
      continue;
    }
    auto& uploaded = uploaded_[type];
    if (!uploaded || vectors_[type] != vectors[type]) {
      uploaded = py::reinterpret_steal<py::object>(put(number_array(type, vectors[type]).ptr(), arguments.device));
      vectors_[type] = vectors[type];
    }
    buffers.push_back(uploaded);
  }
  return buffers;
}

bool in_eager_operation() { return eager_operation; }
void set_eager_operation(bool on) { eager_operation = on; }

// Starting and attaching are one piece: between the two, where donated inputs are gone and results not yet attached, no
// Python code may run, since that is where an interrupt would be raised.
py::object execute(Arguments& arguments, Program& program) {
  auto& in_flight = InFlight::of(arguments.device);
  in_flight.wait_for_programs(kMaxProgramsInFlight - 1);
  release_team();
  static auto &lazy = metric("ExecuteTime"), &eager = metric("EagerOpExecuteTime");
  const Timed whole(eager_operation ? eager : lazy);
  py::object token;
  py::object report_results;  // is told the results
  py::tuple results;
  try {
    const auto numbers = program.number_buffers(arguments);
    std::vector<py::object> buffers;
    {
      const Timed timed(gathering_time());
      program.place_fills(arguments);
      fetch_fills(arguments.leaves, arguments.unfilled);
      buffers = program.packing.gather(arguments);
    }
    buffers.insert(buffers.end(), numbers.begin(), numbers.end());
    py::tuple inputs(buffers.size());
    for (size_t i = 0; i < buffers.size(); ++i) {
      inputs[i] = std::move(buffers[i]);
    }
    if (spans_mesh()) {
      check_alive(inputs);
    }
    if (program.on_start) {
      report_results = program.on_start();
    }
    results = start(program.run(), inputs, arguments);
    token = results[results.size() - 1];
    if (program.waits) {
      block_until_ready(token);
    }
    const Timed timed(attaching_time());
    auto outputs = program.packing.results_of(results);
    for (size_t i = 0; i < outputs.size(); ++i) {
      outputs[i].placement = program.outputs[i].placement;
    }
    arguments.attach(std::move(outputs));
  } catch (...) {  // an interrupt, say
    program.renew();
    if (report_results) {
      report_results(py::none());
    }
    throw;
  }
  in_flight.add_program(token);
  if (report_results) {
    report_results(results);
  }
  return token;
}

}  // namespace torch_xla
