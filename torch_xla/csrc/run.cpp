#include "run.h"

#include "timing.h"

namespace torch_xla {

namespace {

// The results of one run as they are handed out: those that the next step takes at once, the rest when asked for.
class Results {
 public:
  Results(py::object handle, const Packing& packing) : handle_(std::move(handle)), packing_(packing) {
    arrays_ = handle_.attr("disassemble_prefix_into_single_device_arrays")(packing.prompt_packs + packing.prompt);
    for (size_t k = 0; k < packing.prompt_packs; ++k) {
      packs_.push_back(c10::make_intrusive<Pack>(array(k), packing.layouts[k]));
    }
  }

  Graph::Result at(size_t output) {
    const auto& place = packing_.results[output];
    if (packing_.prompt_pack(place)) {
      return {nullptr, packs_[place.pack]};
    }
    if (packing_.prompt_single(place)) {
      return {array(packs_.size() + place.index), {}};
    }
    if (!rest.defined()) {
      rest = c10::make_intrusive<Rest>(Py_NewRef(handle_.ptr()));
    }
    return {nullptr, rest};
  }

  // Tells the sources which leaves are theirs.
  void note(const std::vector<NodePtr>& attached) {
    const auto fill = [&](Rest::Leaves& leaves, const Packing::Members& members) {
      for (const auto output : members.outputs) {
        leaves.emplace_back(attached[output]);
      }
    };
    for (size_t k = 0; k < packs_.size(); ++k) {
      fill(packs_[k]->leaves, packing_.packs[k]);
    }
    if (!rest.defined()) {
      return;
    }
    for (size_t k = packs_.size(); k < packing_.packs.size(); ++k) {
      fill(rest->packs.emplace_back(packing_.layouts[k], Rest::Leaves()).second, packing_.packs[k]);
    }
    for (size_t i = 0; i < attached.size(); ++i) {
      if (packing_.results[i].pack < 0 && !packing_.prompt_single(packing_.results[i])) {
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
