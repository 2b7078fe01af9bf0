#include "run/program.h"

#include <pybind11/numpy.h>

#include <chrono>
#include <deque>
#include <string_view>

#include "base/metric.h"
#include "base/python_hooks.h"

namespace torch_xla {

namespace {

thread_local bool eager_operation = false;

// The tokens of what was started on a device, under the GIL. Never destroyed: the interpreter ends before that.
std::deque<py::object>& runs(c10::DeviceIndex device) {
  static auto* const all = new std::array<std::deque<py::object>, kMaxDevices>;
  return all->at(device);
}

void block(const py::object& token) {
  static auto* const name = PyUnicode_InternFromString("block_until_ready");
  if (!py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(token.ptr(), name))) {
    throw py::error_already_set();
  }
}

// For buffers of a kind it has not seen yet, JAX asks a Python function how to start the program, and that only tells
// it how (dispatch.py): in Python code an interrupt may be raised, which must not happen once donated inputs are gone.
py::tuple start(const py::object& run, const py::tuple& arguments) {
  for (int attempt = 0; attempt < 2; ++attempt) {
    auto results = py::reinterpret_steal<py::object>(PyObject_CallObject(run.ptr(), arguments.ptr()));
    if (!results) {
      throw py::error_already_set();
    }
    if (!results.is_none()) {
      return results;
    }
  }
  TORCH_CHECK(false, "[run] JAX did not start a program that it was told how to start; please report this");
}

// Gives the results to the tensors; the last is the token, which stays.
void attach(Graph& graph, const Packing& packing, const py::tuple& results) {
  const auto array = [&](size_t i) { return Py_NewRef(PyTuple_GET_ITEM(results.ptr(), static_cast<Py_ssize_t>(i))); };
  std::vector<c10::intrusive_ptr<Pack>> packs;
  for (size_t k = 0; k < packing.packs.size(); ++k) {
    packs.push_back(c10::make_intrusive<Pack>(array(k), packing.layouts[k]));
  }
  Vector<Graph::Result> found;
  found.reserve(graph.outputs.size());
  for (const auto& place : packing.results) {
    if (place.pack >= 0) {
      found.push_back({nullptr, packs[place.pack], place.index});
    } else {
      found.push_back({array(packs.size() + place.index)});
    }
  }
  graph.attach(std::move(found));
}

}  // namespace

const py::object& Program::run() {
  if (!run_) {
    run_ = starter();
  }
  return run_;
}

std::vector<py::object> Program::numbers(const Graph& graph) {
  const auto vectors = sharing->pack(graph.numbers);
  std::vector<py::object> buffers;
  const auto add = [&](Sent& sent, const auto& vector) {
    if (vector.empty()) {
      return;
    }
    const std::string_view bytes(reinterpret_cast<const char*>(vector.data()), vector.size() * sizeof(vector[0]));
    if (!sent.buffer || sent.bytes != bytes) {
      const py::array array(static_cast<py::ssize_t>(vector.size()), vector.data());
      sent.buffer = py::reinterpret_steal<py::object>(put(array.ptr(), graph.device));
      sent.bytes = bytes;
    }
    buffers.push_back(sent.buffer);
  };
  add(sent_[0], vectors.floats);
  add(sent_[1], vectors.ints);
  add(sent_[2], vectors.complexes);
  return buffers;
}

void wait_for_runs(c10::DeviceIndex device, size_t left) {
  auto& queue = runs(device);
  if (queue.size() <= left) {
    return;
  }
  const auto start = std::chrono::steady_clock::now();
  while (queue.size() > left) {
    auto token = std::move(queue.front());
    queue.pop_front();
    try {
      block(token);
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) {  // an interrupt: the run goes on, and may still fail
        queue.push_front(std::move(token));
        throw;
      }
      explain(token.ptr(), device);
      throw;
    }
  }
  note_wait(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
}

std::vector<py::object> take_runs(c10::DeviceIndex device) {
  std::vector<py::object> taken(runs(device).begin(), runs(device).end());
  runs(device).clear();
  return taken;
}

size_t runs_in_flight(c10::DeviceIndex device) { return runs(device).size(); }
void add_run(c10::DeviceIndex device, py::object token) { runs(device).push_back(std::move(token)); }

void note_wait(double seconds) {
  static auto &waiting = metric("DeviceLockWait"), &executing = metric("ExecuteTime");
  waiting.add(seconds, "seconds");
  executing.amend(seconds);  // what was started took longer than its start
}

bool in_eager_operation() { return eager_operation; }
void set_eager_operation(bool on) { eager_operation = on; }

// Starting and attaching are one piece: between the two, where donated inputs are gone and results not yet attached, no
// Python code may run, since that is where an interrupt would be raised.
py::object execute(Graph& graph, Program& program) {
  wait_for_runs(graph.device, kRunsAhead - 1);
  static auto &lazy = metric("ExecuteTime"), &eager = metric("EagerOpExecuteTime");
  const Timed whole(eager_operation ? eager : lazy);
  py::object token;
  try {
    const auto numbers = program.numbers(graph);
    std::vector<py::object> buffers;
    {
      const Timed timed(gathering_time());
      buffers = program.packing.gather(graph);
    }
    py::tuple arguments(buffers.size() + numbers.size());
    for (size_t i = 0; i < buffers.size(); ++i) {
      arguments[i] = std::move(buffers[i]);
    }
    for (size_t i = 0; i < numbers.size(); ++i) {
      arguments[buffers.size() + i] = numbers[i];
    }
    const py::tuple results = start(program.run(), arguments);
    token = results[results.size() - 1];
    if (program.waits) {
      block(token);
    }
    const Timed timed(attaching_time());
    attach(graph, program.packing, results);
  } catch (...) {  // an interrupt, say
    program.renew();
    throw;
  }
  add_run(graph.device, token);
  return token;
}

}  // namespace torch_xla
