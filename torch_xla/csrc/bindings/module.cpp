// The Python module `torch_xla._C`.
#include <pybind11/numpy.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include "base/metric.h"
#include "base/python_hooks.h"
#include "base/user_line.h"
#include "cut/graph.h"
#include "cut/packing.h"
#include "device/device.h"
#include "device/random.h"
#include "ir/op_info.h"
#include "record/meta_cache.h"
#include "record/record.h"
#include "record/unboxed.h"
#include "run/binding.h"
#include "run/executable_cache.h"
#include "run/host_kernel.h"
#include "run/program.h"
#include "tensor/placeholder.h"
#include "tensor/tensor_impl.h"

namespace torch_xla {

namespace {

py::object dtype_object(at::ScalarType dtype) {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype)));
}

py::object describe_meta(const Meta& meta) {
  if (!meta.defined()) {
    return py::none();
  }
  py::tuple sizes(meta.sizes.size());
  for (size_t i = 0; i < meta.sizes.size(); ++i) {
    sizes[i] = meta.sizes[i];
  }
  return py::make_tuple(sizes, dtype_object(meta.dtype));
}

py::object describe_frame(Frame frame) {
  return frame != nullptr ? py::object(py::str(*frame)) : py::object(py::none());
}

// A constant as PyTorch's Python functions take it. What is an enumeration in Python is a whole number here, and only
// the schema tells.
py::object describe_constant(const c10::IValue& value, const c10::FunctionSchema& schema, size_t position) {
  if (value.isInt() && position < schema.arguments().size()) {
    auto type = schema.arguments()[position].real_type();
    if (const auto optional = type->cast<c10::OptionalType>()) {
      type = optional->getElementType();
    }
    const auto object = [](auto* found) {
      return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(found));
    };
    switch (type->kind()) {
      case c10::TypeKind::ScalarTypeType:
        return dtype_object(value.toScalarType());
      case c10::TypeKind::LayoutType:
        return object(torch::getTHPLayout(value.toLayout()));
      case c10::TypeKind::MemoryFormatType:
        return object(torch::utils::getTHPMemoryFormat(value.toMemoryFormat()));
      default:
        break;
    }
  }
  return torch::jit::toPyObject(value);
}

// The numbers of a graph in order, which say what of an argument is one.
class NumberReader {
 public:
  explicit NumberReader(const Vector<NumberSlot>& numbers) : next_(numbers.begin()), end_(numbers.end()) {}
  bool take(const Node& node, uint32_t position, uint32_t element) {
    const bool found =
        next_ != end_ && next_->node == node.slot && next_->position == position && next_->element == element;
    next_ += found ? 1 : 0;
    return found;
  }
  void skip(size_t count) { next_ += count; }

 private:
  Vector<NumberSlot>::const_iterator next_;
  Vector<NumberSlot>::const_iterator end_;
};

// An argument as (kind, count or bits, value); the Python side puts inputs and numbers in their places. Of a number the
// count tells whether it was a constant before it varied, and of a list of them which elements are numbers.
py::object describe_arg(const Node& node, uint32_t position, NumberReader& numbers) {
  const auto& arg = node.args[position];
  switch (arg.kind) {
    case Arg::Kind::Input:
      return py::make_tuple("input", 1, py::none());
    case Arg::Kind::Inputs:
      return py::make_tuple("inputs", arg.count, py::none());
    case Arg::Kind::OptInputs:
      return py::make_tuple("optional_inputs", arg.count, arg.value.toInt());
    case Arg::Kind::Attr:
      break;
    case Arg::Kind::Number:
    case Arg::Kind::Adaptive:
    case Arg::Kind::Integer:
      if (arg.value.isList()) {
        py::list flags;
        for (uint32_t e = 0; e < arg.value.toListRef().size(); ++e) {
          flags.append(numbers.take(node, position, e));
        }
        return py::make_tuple("numbers", flags, torch::jit::toPyObject(arg.value));
      }
      if (numbers.take(node, position, 0)) {
        const bool varied = arg.kind == Arg::Kind::Adaptive || node.op->policy(position) != NumberPolicy::Input;
        return py::make_tuple("number", varied, torch::jit::toPyObject(arg.value));
      }
  }
  return py::make_tuple("attr", 0, describe_constant(arg.value, node.op->op.schema(), position));
}

py::list describe_nodes(const Graph& graph) {
  py::list nodes;
  NumberReader numbers(graph.numbers);
  for (const auto& node : graph.nodes) {
    py::list args;
    for (uint32_t i = 0; i < node->args.size(); ++i) {
      args.append(describe_arg(*node, i, numbers));
    }
    numbers.skip(node->seeded ? std::size(node->seed) : 0);
    py::list inputs;
    for (const auto& input : node->inputs) {
      inputs.append(py::make_tuple(input.node->leaf(), input.node->slot, input.index));
    }
    py::list outs;
    for (const auto& meta : node->outs->metas) {
      outs.append(describe_meta(meta));
    }
    nodes.append(py::make_tuple(node->op->name, args, inputs, outs, node->seeded, describe_frame(node->frame),
                                py::make_tuple(node->attrs.hi, node->attrs.lo), describe_frame(node->scope)));
  }
  return nodes;
}

// (buffer, start) as Python takes it; steals the reference.
py::object describe_location(const Location& location) {
  if (location.buffer == nullptr) {
    return py::none();
  }
  return py::make_tuple(py::reinterpret_steal<py::object>(location.buffer), location.start);
}

py::list leaf_locations(const Graph& graph) {
  py::list locations;
  for (const auto& leaf : graph.leaves) {
    auto location = locate(leaf);
    TORCH_CHECK(location.buffer != nullptr, "[run] input ", locations.size(), " has no buffer");
    Py_INCREF(location.buffer);
    locations.append(describe_location(location));
  }
  return locations;
}

// The numbers of the graph as one vector per type: float64, int64, complex128.
py::tuple packed_numbers(Graph& graph) {
  const auto vectors = graph.sharing()->pack(graph.numbers);
  const auto array = [](const auto& v) { return py::array(static_cast<py::ssize_t>(v.size()), v.data()); };
  return py::make_tuple(array(vectors.floats), array(vectors.ints), array(vectors.complexes));
}

py::list describe_fills(const Graph& graph) {
  py::list fills;
  for (const auto& node : graph.fills()) {
    const auto& meta = node->outs->metas[0];
    fills.append(
        py::make_tuple(describe_meta(meta), torch::jit::toPyObject(node->args[1].value), describe_frame(node->frame)));
  }
  return fills;
}

void provide_fills(const Graph& graph, const std::vector<py::object>& buffers) {
  const auto fills = graph.fills();
  TORCH_CHECK(fills.size() == buffers.size(), "[fill] got ", buffers.size(), " buffers, expected ", fills.size());
  const RecorderLock lock;
  for (size_t i = 0; i < fills.size(); ++i) {
    fills[i]->buffer = py::object(buffers[i]).release().ptr();
    fills[i]->args.clear();
  }
}

// Numbers of Python in the places of those that a program was compiled with.
std::unique_ptr<Binding> bind(std::shared_ptr<Program> program, const std::vector<at::Tensor>& inputs,
                              const py::list& numbers, std::vector<at::Tensor> results) {
  auto slots = program->numbers;
  TORCH_CHECK(slots.size() == numbers.size(), "[run] got ", numbers.size(), " numbers, expected ", slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    const py::handle number = numbers[i];
    switch (slots[i].type) {
      case NumberSlot::Type::Int:
        slots[i].integer = number.cast<int64_t>();
        break;
      case NumberSlot::Type::Float:
        slots[i].number = number.cast<double>();
        break;
      case NumberSlot::Type::Complex:
        slots[i].number = number.cast<std::complex<double>>();
    }
  }
  return std::make_unique<Binding>(std::move(program), inputs, std::move(slots), std::move(results));
}

std::string hex(const Hash& hash) {
  char text[33];
  std::snprintf(text, sizeof(text), "%016llx%016llx", static_cast<unsigned long long>(hash.hi),
                static_cast<unsigned long long>(hash.lo));
  return text;
}

c10::DeviceIndex checked_index(int index) {
  TORCH_CHECK(0 <= index && index < static_cast<int>(kMaxDevices), "[device] got device index ", index,
              ", expected 0 to ", kMaxDevices - 1);
  return static_cast<c10::DeviceIndex>(index);
}

void check_count(int count) {
  TORCH_CHECK(0 < count && count <= static_cast<int>(kMaxDevices), "[device] got ", count, " devices, expected 1 to ",
              kMaxDevices, ", as many as PyTorch can count; hide the others from this process");
}

uint64_t tensor_id(const at::Tensor& tensor) {
  TORCH_CHECK(is_xla(tensor), "[tensor] got a tensor on ", tensor.device(), ", expected one on xla");
  const RecorderLock lock;
  return impl_of(tensor)->alias.storage->id;
}

// Frees the memory of an xla storage, or gives it some.
void resize_storage(const at::Storage& storage, int64_t bytes) {
  auto* const ours = dynamic_cast<Storage*>(storage.unsafeGetStorageImpl());
  TORCH_CHECK(ours != nullptr && bytes >= 0, "[storage] got resize_(", bytes, ") of a storage on ", storage.device(),
              ", expected one on xla and no less than 0 bytes");
  Vector<Value> replaced;
  const RecorderLock lock;
  ours->resize(static_cast<size_t>(bytes), {}, replaced);
}

void bind_graph(py::module_& m) {
  py::class_<Packing>(m, "Packing")
      .def(py::init<const Graph&>())
      .def_property_readonly(
          "packs",
          [](const Packing& packing) {
            py::list packs;
            for (const auto& [leaves, outputs] : packing.packs) {
              packs.append(py::make_tuple(py::tuple(py::cast(leaves)), py::tuple(py::cast(outputs))));
            }
            return packs;
          })
      .def("result_metas", [](const Packing& packing, const Graph& g) {
        py::list metas;
        const auto meta = [&](uint32_t output) -> const Meta& {
          return g.outputs[output].node->meta(g.outputs[output].index);
        };
        for (const auto& pack : packing.packs) {
          int64_t size = 0;
          for (const auto output : pack.outputs) {
            size += meta(output).numel();
          }
          metas.append(py::make_tuple(py::make_tuple(size), dtype_object(meta(pack.outputs[0]).dtype)));
        }
        for (uint32_t i = 0; i < packing.results.size(); ++i) {
          if (packing.results[i].pack < 0) {
            metas.append(describe_meta(meta(i)));
          }
        }
        return metas;
      });
  py::class_<Program, std::shared_ptr<Program>>(m, "Program")
      .def(py::init<Graph&, bool>(), py::arg("graph"), py::arg("waits"))
      .def_readonly("packing", &Program::packing)
      .def_readonly("waits", &Program::waits)
      .def("bind", &bind, py::arg("inputs"), py::arg("numbers"), py::arg("results"))
      .def_readwrite("starter", &Program::starter)
      .def_property_readonly("run", &Program::run);
  py::class_<ExecutableCache>(m, "ExecutableCache")
      .def(py::init<>())
      .def("find", &ExecutableCache::find)
      .def("run", &ExecutableCache::run)
      .def("add", &ExecutableCache::add)
      .def("drop", &ExecutableCache::drop)
      .def("clear", &ExecutableCache::clear)
      .def("values", &ExecutableCache::values)
      .def("__len__", &ExecutableCache::size)
      .def_readonly("hits", &ExecutableCache::hits);
  py::class_<Binding>(m, "Binding")
      .def_property_readonly("key", [](Binding& b) { return hex(b.program().key); })
      .def_property_readonly("device", [](const Binding& b) { return static_cast<int>(b.device); })
      .def("execute", [](Binding& b) { return execute(b, b.program()); });
  py::class_<Graph>(m, "Graph")
      .def_property_readonly("key", [](const Graph& g) { return hex(g.key); })
      .def_property_readonly("device", [](const Graph& g) { return static_cast<int>(g.device); })
      .def_property_readonly("num_nodes", [](const Graph& g) { return g.nodes.size(); })
      .def_property_readonly("num_leaves", [](const Graph& g) { return g.leaves.size(); })
      .def_property_readonly("num_outputs", [](const Graph& g) { return g.outputs.size(); })
      .def_property_readonly("donated",
                             [](const Graph& g) {
                               py::list indices;
                               for (size_t i = 0; i < g.donated.size(); ++i) {
                                 if (g.donated[i]) {
                                   indices.append(i);
                                 }
                               }
                               return indices;
                             })
      .def_readonly("successors", &Graph::successors)
      .def_property_readonly("outputs",
                             [](const Graph& g) {
                               py::list outputs;
                               for (const auto& v : g.outputs) {
                                 outputs.append(py::make_tuple(v.node->slot, v.index));
                               }
                               return outputs;
                             })
      .def_property_readonly("leaf_metas",
                             [](const Graph& g) {
                               py::list metas;
                               for (const auto& leaf : g.leaves) {
                                 metas.append(describe_meta(leaf->outs->metas[0]));
                               }
                               return metas;
                             })
      .def_property_readonly("leaf_frames",
                             [](const Graph& g) {
                               py::list frames;
                               for (const auto& leaf : g.leaves) {
                                 frames.append(describe_frame(leaf->frame));
                               }
                               return frames;
                             })
      .def("describe_nodes", &describe_nodes)
      .def("leaf_locations", &leaf_locations)
      .def_property_readonly("number_places", [](Graph& g) { return py::tuple(py::cast(g.sharing()->places)); })
      .def("packed_numbers", &packed_numbers)
      .def("describe_fills", &describe_fills)
      .def("provide_fills", &provide_fills)
      .def("execute", [](Graph& g, Program& program) { return execute(g, program); })
      .def_property_readonly("has_fills", [](const Graph& g) { return g.has_fills(); })
      .def_property_readonly("fits_host", &Graph::fits_host)
      .def_property_readonly("unheld_bytes", &Graph::unheld_bytes)
      .def("attach_shared",
           [](Graph& g, const std::vector<py::object>& buffers) {
             Vector<Arguments::Result> results(buffers.size());
             for (size_t i = 0; i < buffers.size(); ++i) {
               results[i].buffer = py::object(buffers[i]).release().ptr();
             }
             g.attach_shared(std::move(results));
           })
      .def("constants_vary", &Graph::constants_vary)
      .def("clear", &Graph::clear)
      .def("halves", &Graph::halves)
      .def("abandon", &Graph::abandon, py::arg("error"), py::arg("failed_nodes") = std::vector<size_t>(),
           py::arg("failed_fills") = std::vector<size_t>());
  py::class_<Cut> cut(m, "Cut");
  py::enum_<Cut::Scope>(cut, "Scope")
      .value("NEEDED", Cut::Scope::kNeeded)
      .value("LIVE", Cut::Scope::kLive)
      .value("PENDING", Cut::Scope::kPending);
  py::enum_<Cut::Donate>(cut, "Donate")
      .value("NOTHING", Cut::Donate::kNothing)
      .value("GIVEN", Cut::Donate::kGiven)
      .value("OVERWRITTEN", Cut::Donate::kOverwritten);
  cut.def_static(
         "of_device",
         [](int device, uint64_t until) { return Cut::of_device(static_cast<c10::DeviceIndex>(device), until); },
         py::arg("device"), py::arg("until") = Cut::kNow)
      .def_static("of_tensors", &Cut::of_tensors, py::arg("tensors"), py::arg("scope") = Cut::Scope::kNeeded,
                  py::arg("donate") = Cut::Donate::kNothing)
      .def("graph", &Cut::graph)
      .def("preview", &Cut::preview);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  bind_graph(m);
  m.def("node_sequence", &node_sequence);
  m.def("has_pending", [](int device) { return has_pending(static_cast<c10::DeviceIndex>(device)); });
  m.def("buffer_of", [](const at::Tensor& t) {
    auto* const buffer = buffer_of(t);
    return buffer != nullptr ? py::reinterpret_steal<py::object>(buffer) : py::object(py::none());
  });
  m.def("location_of", [](const at::Tensor& t) { return describe_location(location_of(t)); });
  m.def(
      "tensor_of",
      [](const py::object& buffer, const std::vector<int64_t>& sizes, const py::object& dtype, int device,
         uint32_t placement) {
        const auto meta = contiguous_meta(sizes, reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type);
        auto leaf = make_leaf(meta, py::object(buffer).release().ptr());
        leaf.node->placement = placement;
        return make_tensor(std::move(leaf), meta, static_cast<c10::DeviceIndex>(device));
      },
      py::arg("buffer"), py::arg("sizes"), py::arg("dtype"), py::arg("device"), py::arg("placement") = 0);
  m.def("placeholder", [](const std::vector<int64_t>& sizes, const py::object& dtype, int device) {
    return make_placeholder(contiguous_meta(sizes, reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type),
                            static_cast<c10::DeviceIndex>(device));
  });
  m.def("is_placeholder", py::overload_cast<const at::Tensor&>(&is_placeholder));
  m.def("tensor_id", &tensor_id);
  m.def("give_buffer", &give_buffer);
  m.def("is_given", &is_given);
  m.def("is_lost", &is_lost);
  m.def("storage_generation", [](const at::Tensor& t) {
    const RecorderLock lock;
    return impl_of(t)->alias.storage->generation;
  });
  m.def("base_of", &base_of);
  m.def("set_storage",
        [](const at::Tensor& t, const at::Storage& storage, int64_t offset, const std::vector<int64_t>& sizes,
           const std::vector<int64_t>& strides) { set_storage(t, storage, offset, sizes, strides); });
  m.def("resize_storage", &resize_storage);
  m.def("live_tensors", [](int device) {
    py::list found;
    std::vector<std::tuple<MetaRef, bool, Frame>> live;
    {
      const RecorderLock lock;
      for_each_storage(static_cast<c10::DeviceIndex>(device), [&](Storage& s) {
        const auto& node = *s.value.node;
        if (node.error == nullptr && !is_placeholder(*s.value.node)) {
          live.emplace_back(s.meta, !node.leaf(), node.frame);
        }
      });
    }
    for (const auto& [meta, pending, frame] : live) {
      found.append(py::make_tuple(describe_meta(*meta), pending, describe_frame(frame)));
    }
    return found;
  });
  m.def("drain_released", &drain_released);
  m.def("set_python_hooks", [](const py::object& hooks) { set_python_hooks(hooks.ptr()); });
  m.attr("RUNS_AHEAD") = kRunsAhead;
  m.def(
      "wait_for_runs", [](int device, size_t left) { wait_for_runs(static_cast<c10::DeviceIndex>(device), left); },
      py::arg("device"), py::arg("left") = 0);
  m.def("take_runs", [](int device) { return take_runs(static_cast<c10::DeviceIndex>(device)); });
  m.def("buffers_on", [](int device) {
    py::list found;
    for (auto* const buffer : buffers_on(static_cast<c10::DeviceIndex>(device))) {
      found.append(py::reinterpret_steal<py::object>(buffer));
    }
    return found;
  });
  m.def("lose_buffers", [](int device, const std::vector<py::object>& buffers, const std::string& error) {
    std::vector<PyObject*> failed;
    std::transform(buffers.begin(), buffers.end(), std::back_inserter(failed), [](const auto& b) { return b.ptr(); });
    lose_buffers(static_cast<c10::DeviceIndex>(device), failed, error);
  });
  m.def("has_xla_type",
        [](const py::object& dtype) { return has_xla_type(reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type); });
  m.def("runs_in_flight", [](int device) { return runs_in_flight(static_cast<c10::DeviceIndex>(device)); });
  m.def("add_run", [](int device, py::object token) { add_run(static_cast<c10::DeviceIndex>(device), token); });
  m.def("in_eager_operation", &in_eager_operation);
  m.def("set_eager_operation", &set_eager_operation);
  m.def("host_kernel_target", &host_kernel_target);
  m.def("set_eager", &set_eager);
  m.def("is_eager", &eager);
  m.def("set_special_numbers", &set_special_numbers);
  m.def("set_frame_depth", &set_frame_depth);
  m.def("set_scope", &set_scope);
  m.def("user_frame", [] { return describe_frame(user_frame()); });
  m.def("whereabouts", [](unsigned long thread) {
    const auto [line, loading] = whereabouts(thread);
    return py::make_tuple(describe_frame(line), loading);
  });
  m.def("add_skipped_prefix", &add_skipped_prefix);
  m.def("demote_numbers", [](const std::string& name, const std::string& overload, const std::vector<size_t>& places) {
    auto& info = op_info(name.c_str(), overload.c_str());
    bool changed = false;
    for (const auto place : places) {
      changed = info.demote(place) || changed;
    }
    return changed;
  });
  m.def("record_whole", &record_whole);
  m.def("keep_on_host", &keep_on_host);
  m.def("refuse_packing", &refuse_packing);
  m.def("unboxed_kernels", &unboxed_kernels);
  m.def("op_counts", &op_counts);
  m.def("created_tensors", &created_tensors);
  m.def("destroyed_tensors", &destroyed_tensors);
  m.def(
      "add_sample", [](std::string_view name, double value, std::string_view unit) { metric(name).add(value, unit); },
      py::arg("name"), py::arg("value"), py::arg("unit") = "seconds");
  m.def("note_wait", &note_wait);
  m.def("metric", [](std::string_view name) -> py::object {
    const auto found = snapshot_of(name);
    if (!found) {
      return py::none();
    }
    return py::make_tuple(found->unit, found->count, found->total, found->samples, found->every);
  });
  m.def("metric_names", &metric_names);
  m.def("clear_metrics", &clear_metrics);
  m.def("shape_cache_misses", &shape_cache_misses);
  m.def("set_device_count", [](int n) {
    check_count(n);
    set_device_count(static_cast<c10::DeviceIndex>(n));
  });
  m.def("device_count", [] { return static_cast<int>(device_count()); });
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("set_current_device", [](int i) { set_current_device(checked_index(i)); });
  m.def("rng_state", [](int device) { return random_state(checked_index(device)); });
  m.def("set_rng_state",
        [](int device, uint64_t seed, uint64_t offset) { set_random_state(checked_index(device), seed, offset); });
}

}  // namespace torch_xla
