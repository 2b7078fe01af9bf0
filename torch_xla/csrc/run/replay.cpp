#include "run/replay.h"

#include <algorithm>

#include "base/python_hooks.h"
#include "tensor/lazy_clone.h"
#include "tensor/tensor_impl.h"
#include "tensor/view_path.h"

namespace torch_xla {

namespace {

using Where = Replay::Place::Where;

void set_number(NumberSlot& slot, const py::handle& value) {
  switch (slot.type) {
    case NumberSlot::Type::Int:
      slot.integer = value.cast<int64_t>();
      break;
    case NumberSlot::Type::Float:
      slot.number = value.cast<double>();
      break;
    case NumberSlot::Type::Complex:
      slot.number = value.cast<std::complex<double>>();
  }
}

// The same steps, which remember values of another storage.
ViewPath copy_of(const ViewPath& path) {
  ViewPath copy;
  for (const auto* step : steps_of(path)) {
    copy = make_step(std::move(copy), *step->op, Args(step->args), step->in, step->out);
  }
  return copy;
}

}  // namespace

Replay::Made::Made(uint32_t p, const at::Tensor& like) : place(p) {
  const RecorderLock lock;
  const auto& alias = impl_of(like)->alias;
  path = copy_of(alias.path);
  meta = alias.meta;
}

Replay::Replay(std::shared_ptr<Program> program, const Recording& recording, Plan plan)
    : program_(std::move(program)), plan_(std::move(plan)) {
  device = program_->device;
  for (const auto& number : recording.numbers) {
    numbers.push_back(number.slot);
  }
  TORCH_CHECK(plan_.inputs.size() == program_->inputs.size() && numbers.size() == program_->numbers.size() &&
                  recording.whole_key == program_->whole_key,
              "[replay] got a recording of another program than is to be run: ", plan_.inputs.size(), " inputs of ",
              program_->inputs.size(), ", ", numbers.size(), " numbers of ", program_->numbers.size(),
              recording.whole_key == program_->whole_key ? "" : ", another key", "; please report this");
  place_of_output_.assign(program_->outputs.size(), -1);
  written_.assign(plan_.places.size(), false);
  for (const auto& write : plan_.writes) {
    written_.at(write.place) = true;
    if (write.output >= 0 && place_of_output_.at(write.output) < 0) {
      place_of_output_[write.output] = static_cast<int32_t>(write.place);
    }
  }
  for (const auto& place : plan_.places) {
    if (place.where == Where::Storage) {
      lasting_.insert(place.storage._unsafe_get_target());
    }
  }
}

bool Replay::prepare(const std::vector<at::Tensor>& arguments, const py::list& values) {
  forget();
  for (size_t i = 0; i < plan_.varying.size(); ++i) {
    set_number(numbers.at(plan_.varying[i]), values[i]);
  }
  const char* wrong = program_->sharing->holds(numbers) ? find_parameters() : "numbers that were equal differ";
  if (*wrong == '\0') {
    wrong = find_places(arguments);
  }
  if (*wrong != '\0') {
    refused = wrong;
    forget();
    return false;
  }
  std::vector<uint32_t> where(plan_.uploads.size(), kWhole);
  for (size_t i = 0; i < plan_.inputs.size(); ++i) {
    if (plan_.inputs[i].from == Input::From::Upload) {
      where.at(plan_.inputs[i].index) = program_->inputs[i].placement;
    }
  }
  for (const auto& [argument, sizes, dtype] : plan_.uploads) {
    const auto host = arguments.at(argument).to(at::kCPU, dtype).resolve_conj().resolve_neg().expand(sizes);
    const auto placement = where[uploaded_.size()];
    uploaded_.push_back(make_leaf(contiguous_meta(sizes, dtype), upload(host, device, placement, false)).node);
    uploaded_.back()->placement = placement;
  }
  wrong = find_leaves();
  if (*wrong != '\0') {
    refused = wrong;
    forget();
    return false;
  }
  std::vector<size_t> copied;
  {
    const RecorderLock lock;
    copied = written_for_others();
  }
  copy_leaves(copied);
  return true;
}

const char* Replay::find_parameters() {
  for (const auto& parameter : plan_.parameters) {
    auto impl = parameter.tensor.lock();
    if (!impl) {
      return "a parameter is gone";
    }
    parameters_.emplace_back(std::move(impl));
    if (parameters_.back().grad().defined() != parameter.had_gradient) {
      return parameter.had_gradient ? "a parameter has no gradient" : "a parameter has a gradient";
    }
  }
  return "";
}

const char* Replay::find_places(const std::vector<at::Tensor>& arguments) {
  std::unordered_set<const Storage*> others;
  storages_.reserve(plan_.places.size());
  for (const auto& place : plan_.places) {
    StoragePtr storage;
    if (place.where == Where::Storage) {
      storage = place.storage.lock();
      if (!storage) {
        return "a tensor that lived on from call to call is gone";
      }
    } else if (place.where != Where::Fresh) {
      const auto& tensor =
          place.where == Where::Argument ? arguments.at(place.index) : parameters_.at(place.index).grad();
      if (!is_xla(tensor) || tensor.device().index() != device) {
        return "a tensor is on another device";
      }
      storage = impl_of(tensor)->alias.storage;
      if (lasting_.count(storage.get()) != 0 || !others.insert(storage.get()).second) {
        return "two tensors share memory";
      }
      if (written_[storages_.size()] && !tensor.is_inference()) {
        versions_.push_back(tensor.unsafeGetTensorImpl()->version_counter());
      }
    }
    storages_.push_back(std::move(storage));
  }
  return "";
}

const char* Replay::find_leaves() {
  const RecorderLock lock;
  for (size_t i = 0; i < storages_.size(); ++i) {
    if (!storages_[i].defined()) {
      continue;
    }
    auto& storage = *storages_[i];
    const auto& expected = plan_.places[i].meta;
    resolve(storage.value);
    const auto& node = *storage.value.node;
    if (storage.meta->layout != expected->layout || storage.meta->offset != expected->offset) {
      return "a tensor has another shape, dtype or strides";
    }
    if (!node.leaf() || node.unfilled() || node.error != nullptr || node.given) {
      return "a tensor has no value of its own yet";
    }
  }
  for (size_t i = 0; i < plan_.inputs.size(); ++i) {
    const auto [from, index] = plan_.inputs[i];
    leaves.push_back(from == Input::From::Place      ? storages_[index]->value.node
                     : from == Input::From::Constant ? impl_of(plan_.constants[index])->alias.storage->value.node
                                                     : uploaded_.at(index));
    if (!(program_->inputs[i] == Program::Type{leaves[i]->meta(0).value, leaves[i]->placement})) {
      return "an input has another shape or dtype";
    }
  }
  for (const auto& write : plan_.writes) {
    if (write.output < 0) {
      const auto& value = storages_[write.from]->value;
      if (!is_cloneable(*value.node)) {
        return "a value that is copied is not there";
      }
      moved_.push_back(clone_leaf(value, {}));
    }
  }
  return "";
}

// Inputs that the program writes over although more is left of them than the value that a result replaces.
std::vector<size_t> Replay::written_for_others() const {
  std::vector<size_t> found;
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (!program_->packing.donated[i]) {
      continue;
    }
    const auto& leaf = leaves[i];
    const auto successor = program_->successors[i];
    const auto place = successor >= 0 ? place_of_output_[successor] : -1;
    size_t ours = 1;
    bool replaced = false;
    if (place >= 0 && storages_[place].defined()) {
      const auto& storage = *storages_[place];
      replaced = storage.value.node == leaf;
      ours += replaced ? 1 : 0;
      ours += storage.synced && storage.synced.node == leaf ? 1 : 0;
    }
    if (!replaced || leaf.use_count() != ours + waiting_clones(*leaf)) {
      found.push_back(i);
    }
  }
  return found;
}

void Replay::copy_leaves(const std::vector<size_t>& which) {
  std::vector<PyObject*> buffers;
  for (const auto i : which) {
    fetch_clones(clones_to_fetch({leaves[i]}, {false}));
    fetch_buffer(leaves[i]);
    buffers.push_back(leaves[i]->buffer);
  }
  const auto copies = buffers.empty() ? buffers : copy(buffers);
  const RecorderLock lock;
  for (size_t k = 0; k < which.size(); ++k) {
    auto& leaf = leaves[which[k]];
    old_.push_back({std::exchange(leaf, make_leaf({leaf->outs, 0}, copies[k]).node), 0});
  }
}

py::object Replay::run() { return execute(*this, *program_); }

void Replay::replace(Storage& storage, Value value) {
  for (auto* held : {&storage.value, &storage.synced, &storage.origin}) {
    old_.push_back(std::move(*held));
  }
  storage.origin = {};
  storage.value = storage.synced = std::move(value);
  storage.placement = storage.value.node->placement;
  ++storage.generation;
}

void Replay::attach(Vector<Result> given) {
  std::vector<Value> values(given.size());
  auto moved = moved_.begin();
  const RecorderLock lock;
  for (const auto& write : plan_.writes) {
    auto& storage = storages_[write.place];
    Value value;
    if (write.output < 0) {
      value = std::move(*moved++);
    } else if (auto& known = values[write.output]) {
      value = clone_leaf(known, {});
    } else {
      auto& result = given[write.output];
      known = make_leaf(plan_.places[write.place].meta, std::exchange(result.buffer, nullptr));
      known.node->source = std::move(result.source);
      known.node->place = result.place;
      known.node->placement = result.placement;
      value = known;
    }
    if (storage.defined()) {
      replace(*storage, std::move(value));
    } else {
      storage = c10::make_intrusive<Storage>(value, plan_.places[write.place].meta, device);
      storage->synced = std::move(value);
    }
  }
  for (auto& result : given) {
    release_object(result.buffer);  // nobody has it any more
  }
}

at::Tensor Replay::make(const Made& made) const {
  Alias alias;
  alias.storage = storages_.at(made.place);
  alias.path = copy_of(made.path);
  alias.meta = made.meta;
  alias.layout = alias.storage->layouts;
  return make_tensor(std::move(alias));
}

std::vector<at::Tensor> Replay::take_results() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto then = plan_.parameters[i].then;
    if (then == Parameter::Then::Clear) {
      parameters_[i].mutable_grad() = at::Tensor();
    } else if (then == Parameter::Then::Make) {
      parameters_[i].mutable_grad() = make(plan_.parameters[i].made);
    }
  }
  std::vector<at::Tensor> results;
  results.reserve(plan_.results.size());
  for (const auto& made : plan_.results) {
    results.push_back(make(made));
  }
  for (auto* const versions : {&plan_.versions, &versions_}) {
    std::for_each(versions->begin(), versions->end(), [](auto& version) { version.bump(); });
  }
  forget();
  return results;
}

void Replay::forget() {
  leaves.clear();
  moved_.clear();
  uploaded_.clear();
  parameters_.clear();
  versions_.clear();
  storages_.clear();
  old_.clear();
}

}  // namespace torch_xla
