#include "bindings/bindings.h"
#include "bindings/describe.h"
#include "cut/recording.h"
#include "ir/op_info.h"
#include "run/replay.h"
#include "tensor/tensor_impl.h"

namespace torch_xla {

namespace {

using Made = std::pair<uint32_t, at::Tensor>;

py::object value_of(const NumberSlot& slot) {
  switch (slot.type) {
    case NumberSlot::Type::Int:
      return py::int_(slot.integer);
    case NumberSlot::Type::Float:
      return py::float_(slot.number.real());
    default:
      return py::cast(std::complex<double>(slot.number.real(), slot.number.imag()));
  }
}

// (value, whether it is a random number's seed, the operator, its line)
py::list describe_numbers(const Recording& recording) {
  py::list found;
  for (const auto& [slot, op, frame] : recording.numbers) {
    const bool seed = slot.position == NumberSlot::kSeed;
    found.append(py::make_tuple(value_of(slot), seed, seed ? 0 : slot.position, *op, describe_frame(frame)));
  }
  return found;
}

// (storage, whether it existed, output or -1, storage that it was copied from or 0, the line that made its value)
py::list describe_changes(const Recording& recording) {
  py::list found;
  for (const auto& c : recording.changes) {
    found.append(py::make_tuple(c.storage, c.existed, c.output, c.from, describe_frame(c.frame)));
  }
  return found;
}

// (source, shape, dtype); None for a source that is gone.
py::list describe_uploads(const Recording& recording) {
  py::list found;
  for (const auto& u : recording.watch.uploads) {
    auto source = u.source.lock();
    found.append(py::make_tuple(source ? py::cast(at::Tensor(std::move(source))) : py::none(), py::cast(u.sizes),
                                dtype_object(u.dtype)));
  }
  return found;
}

std::unique_ptr<Replay> make_replay(
    std::shared_ptr<Program> program, const Recording& recording,
    const std::vector<std::tuple<int, uint32_t, uint64_t>>& places, const std::vector<std::pair<int, uint32_t>>& inputs,
    std::vector<at::Tensor> constants,
    const std::vector<std::tuple<uint32_t, std::vector<int64_t>, py::object>>& uploads,
    const std::vector<std::tuple<uint32_t, int32_t, uint32_t>>& writes,
    const std::vector<std::tuple<at::Tensor, bool, int, std::optional<Made>>>& parameters,
    const std::vector<Made>& results, std::vector<uint32_t> varying, const std::vector<at::Tensor>& versions) {
  Replay::Plan plan;
  for (const auto& [where, index, storage] : places) {
    const auto& known = recording.storage(storage);
    plan.places.push_back({static_cast<Replay::Place::Where>(where), index, known.storage, known.meta});
  }
  for (const auto& [from, index] : inputs) {
    plan.inputs.push_back({static_cast<Replay::Input::From>(from), index});
  }
  plan.constants = std::move(constants);
  for (const auto& [argument, sizes, dtype] : uploads) {
    plan.uploads.push_back({argument, sizes, dtype_of(dtype)});
  }
  for (const auto& [place, output, from] : writes) {
    plan.writes.push_back({place, output, from});
  }
  for (const auto& [tensor, had_gradient, then, made] : parameters) {
    plan.parameters.push_back({Watch::WeakTensor(tensor.getIntrusivePtr()), had_gradient,
                               static_cast<Replay::Parameter::Then>(then),
                               made ? Replay::Made{made->first, made->second} : Replay::Made{}});
  }
  for (const auto& [place, like] : results) {
    plan.results.push_back({place, like});
  }
  plan.varying = std::move(varying);
  for (const auto& tensor : versions) {
    plan.versions.push_back(tensor.unsafeGetTensorImpl()->version_counter());
  }
  return std::make_unique<Replay>(std::move(program), recording, std::move(plan));
}

// How many tensors are aliases of a storage; each holds it twice.
size_t count_aliases(const at::Tensor& tensor) {
  TORCH_CHECK(is_xla(tensor), "[tensor] got a tensor on ", tensor.device(), ", expected one on xla");
  return impl_of(tensor)->alias.storage.use_count() / 2;
}

// For each tensor that is a view of its storage, or that shares one with an earlier tensor: (position, how it shows the
// storage, position of the first of that storage).
py::list describe_sharing(const std::vector<at::Tensor>& tensors) {
  py::list found;
  std::unordered_map<const Storage*, size_t> first;
  std::vector<std::tuple<size_t, Hash, size_t>> shared;
  {
    const RecorderLock lock;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (is_xla(tensors[i])) {
        const auto& alias = impl_of(tensors[i])->alias;
        const auto place = first.emplace(alias.storage.get(), i).first->second;
        if (alias.path.defined() || place != i) {
          shared.emplace_back(i, hash_path(alias.path), place);
        }
      }
    }
  }
  for (const auto& [i, hash, place] : shared) {
    found.append(py::make_tuple(i, hash.hi ^ hash.lo, place));
  }
  return found;
}

}  // namespace

void bind_replays(py::module_& m) {
  py::class_<Recording>(m, "Recording")
      .def(py::init([](int device) { return std::make_unique<Recording>(static_cast<c10::DeviceIndex>(device)); }))
      .def("stop", &Recording::stop)
      .def("see", &Recording::see)
      .def_property_readonly("reads", [](const Recording& r) { return py::cast(r.reads); })
      .def_property_readonly("copied", [](const Recording& r) { return py::cast(r.copied); })
      .def_property_readonly("gone", [](const Recording& r) { return py::cast(r.gone); })
      .def("lives", &Recording::lives)
      .def_readonly("relaid", &Recording::relaid)
      .def_property_readonly("numbers", &describe_numbers)
      .def_property_readonly("changes", &describe_changes)
      .def_property_readonly("uploads", &describe_uploads)
      .def_property_readonly("touched", [](const Recording& r) {
        py::list found;
        for (auto& [tensor, written] : r.touched()) {
          found.append(py::make_tuple(tensor, written));
        }
        return found;
      });
  m.def("count_aliases", &count_aliases);
  m.def("describe_sharing", &describe_sharing);
  py::class_<Replay>(m, "Replay")
      .def(py::init(&make_replay), py::arg("program"), py::arg("recording"), py::arg("places"), py::arg("inputs"),
           py::arg("constants"), py::arg("uploads"), py::arg("writes"), py::arg("parameters"), py::arg("results"),
           py::arg("varying"), py::arg("versions"))
      .def_property_readonly("key", [](Replay& r) { return hex(r.program().key); })
      .def_property_readonly("device", [](const Replay& r) { return static_cast<int>(r.device); })
      .def_readonly("refused", &Replay::refused)
      .def("run", [](Replay& r, const std::vector<at::Tensor>& arguments, const py::list& values) -> py::object {
        if (!r.prepare(arguments, values)) {
          return py::none();
        }
        try {
          const auto token = r.run();
          return py::make_tuple(token, r.take_results());
        } catch (...) {
          r.forget();
          throw;
        }
      });
}

}  // namespace torch_xla
