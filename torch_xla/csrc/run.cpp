#include "run.h"

#include "timing.h"

namespace torch_xla {

namespace {

// The results of one run as they are handed out: the packs and the prompt single ones at once, the rest when asked for.
class Results {
 public:
  Results(py::object handle, const Packing& packing) : handle_(std::move(handle)), packing_(packing) {
    const auto packs = packing.packs.size();
    arrays_ = handle_.attr("disassemble_prefix_into_single_device_arrays")(packing.prompt + packs);
    for (size_t k = 0; k < packs; ++k) {
      packs_.push_back(c10::make_intrusive<Pack>(array(k), packing.layouts[k]));
    }
  }

  Graph::Result at(size_t output) {
    const auto& place = packing_.results[output];
    if (place.pack >= 0) {
      return {nullptr, packs_[place.pack]};
    }
    if (place.index < packing_.prompt) {
      return {array(packs_.size() + place.index), {}};
    }
    if (!rest.defined()) {
      rest = c10::make_intrusive<Rest>(Py_NewRef(handle_.ptr()));
    }
    return {nullptr, rest};
  }

  // Tells the sources which leaves are theirs.
  void note(const std::vector<NodePtr>& attached) {
    for (size_t k = 0; k < packs_.size(); ++k) {
      for (const auto output : packing_.packs[k].outputs) {
        packs_[k]->leaves.emplace_back(attached[output]);
      }
    }
    for (size_t i = 0; rest.defined() && i < attached.size(); ++i) {
      const auto& place = packing_.results[i];
      if (place.pack < 0 && place.index >= packing_.prompt) {
        rest->leaves.emplace_back(attached[i]);
      }
    }
  }

  c10::intrusive_ptr<Rest> rest;

 private:
  PyObject* array(size_t i) const {
    return py::object(py::reinterpret_borrow<py::sequence>(arrays_[i])[0]).release().ptr();
  }

  py::object handle_;
  const Packing& packing_;
  py::sequence arrays_;
  std::vector<c10::intrusive_ptr<Pack>> packs_;
};

}  // namespace

// Starting and attaching are one piece: between the two, where donated inputs are gone and results not yet attached, no
// Python code may run, since that is where an interrupt would be raised.
py::object execute(Graph& graph, const py::object& run, const Packing& packing, const py::list& numbers, bool wait) {
  std::vector<PyObject*> buffers;
  {
    const Timed timed(gathering_time());
    buffers = packing.gather(graph);
  }
  py::list arguments(buffers.size() + numbers.size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    arguments[i] = py::reinterpret_steal<py::object>(buffers[i]);
  }
  for (size_t i = 0; i < numbers.size(); ++i) {
    arguments[buffers.size() + i] = numbers[i];
  }
  py::object handle = run(arguments, py::arg("with_tokens") = true);
  py::object token = handle.attr("consume_token")();
  if (wait) {
    token.attr("block_until_ready")();
  }
  const Timed timed(attaching_time());
  // What is left of the run before this one is fetched now, so that one living result does not keep its dead siblings.
  static auto* const previous = new c10::weak_intrusive_ptr<Rest>(c10::intrusive_ptr<Rest>());
  if (const auto rest = previous->lock()) {
    rest->fetch();
  }
  Results results(std::move(handle), packing);
  std::vector<Graph::Result> found;
  found.reserve(graph.outputs.size());
  for (size_t i = 0; i < graph.outputs.size(); ++i) {
    found.push_back(results.at(i));
  }
  results.note(graph.attach(std::move(found)));
  *previous = c10::weak_intrusive_ptr<Rest>(results.rest);
  return token;
}

}  // namespace torch_xla
