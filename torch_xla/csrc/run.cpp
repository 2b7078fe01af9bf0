#include "run.h"

#include <pybind11/numpy.h>

#include <string_view>

#include "metric.h"

namespace torch_xla {

namespace {

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
  std::vector<Graph::Result> found;
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

std::vector<py::object> Program::numbers(const Graph& graph, const py::object& put) {
  const auto vectors = sharing->pack(graph.numbers);
  std::vector<py::object> buffers;
  const auto add = [&](Sent& sent, const auto& vector) {
    if (vector.empty()) {
      return;
    }
    const std::string_view bytes(reinterpret_cast<const char*>(vector.data()), vector.size() * sizeof(vector[0]));
    if (!sent.buffer || sent.bytes != bytes) {
      const py::array array(static_cast<py::ssize_t>(vector.size()), vector.data());
      sent.buffer = put(array, static_cast<int>(graph.device));
      sent.bytes = bytes;
    }
    buffers.push_back(sent.buffer);
  };
  add(sent_[0], vectors.floats);
  add(sent_[1], vectors.ints);
  add(sent_[2], vectors.complexes);
  return buffers;
}

// Starting and attaching are one piece: between the two, where donated inputs are gone and results not yet attached, no
// Python code may run, since that is where an interrupt would be raised.
py::object execute(Graph& graph, Program& program, const py::object& put, std::string_view stage) {
  const Timed whole(metric(stage));
  const auto numbers = program.numbers(graph, put);
  std::vector<PyObject*> buffers;
  {
    const Timed timed(gathering_time());
    buffers = program.packing.gather(graph);
  }
  py::tuple arguments(buffers.size() + numbers.size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    arguments[i] = py::reinterpret_steal<py::object>(buffers[i]);
  }
  for (size_t i = 0; i < numbers.size(); ++i) {
    arguments[buffers.size() + i] = numbers[i];
  }
  const py::tuple results = start(program.run, arguments);
  py::object token = results[results.size() - 1];
  if (program.waits) {
    token.attr("block_until_ready")();
  }
  const Timed timed(attaching_time());
  attach(graph, program.packing, results);
  return token;
}

}  // namespace torch_xla
