#include "cut/graph.h"

#include <pybind11/numpy.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include "bindings/bindings.h"
#include "bindings/describe.h"
#include "cut/division.h"
#include "cut/packing.h"
#include "ir/op_info.h"
#include "run/by_operator.h"
#include "run/program.h"

namespace torch_xla {

namespace {

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
  return to_python(value);
}

// The numbers of a graph in order, which say what of an argument is one.
class NumberReader {
 public:
  explicit NumberReader(const Vector<NumberSlot>& numbers) : next_(numbers.begin()), end_(numbers.end()) {}
  // From those of a node on.
  NumberReader(const Vector<NumberSlot>& numbers, const Node& node) : NumberReader(numbers) {
    next_ = std::partition_point(next_, end_, [&](const NumberSlot& slot) { return slot.node < node.slot; });
  }
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
        return py::make_tuple("numbers", flags, to_python(arg.value));
      }
      if (numbers.take(node, position, 0)) {
        const bool varied = arg.kind == Arg::Kind::Adaptive || node.op->policy(position) != NumberPolicy::Input;
        return py::make_tuple("number", varied, to_python(arg.value));
      }
  }
  return py::make_tuple("attr", 0, describe_constant(arg.value, node.op->op.schema(), position));
}

py::tuple describe_node(const Node& node, NumberReader& numbers) {
  py::list args;
  for (uint32_t i = 0; i < node.args.size(); ++i) {
    args.append(describe_arg(node, i, numbers));
  }
  numbers.skip(node.seeded ? std::size(node.seed) : 0);
  py::list inputs;
  for (const auto& input : node.inputs) {
    inputs.append(py::make_tuple(input.node->leaf(), input.node->slot, input.index));
  }
  py::list outs;
  for (const auto& meta : node.outs->metas) {
    outs.append(describe_meta(meta));
  }
  return py::make_tuple(node.op->name, args, inputs, outs, node.seeded, describe_frame(node.frame),
                        py::make_tuple(node.attrs.hi, node.attrs.lo), describe_frame(node.scope), node.settings);
}

py::list describe_nodes(const Graph& graph) {
  py::list nodes;
  NumberReader numbers(graph.numbers);
  for (const auto& node : graph.nodes) {
    nodes.append(describe_node(*node, numbers));
  }
  return nodes;
}

// One node of a graph by itself, and its seed and offset if it draws.
py::tuple describe_one(const Graph& graph, size_t position) {
  const auto& node = *graph.nodes.at(position);
  NumberReader numbers(graph.numbers, node);
  auto seed = node.seeded ? py::object(py::make_tuple(node.seed[0], node.seed[1])) : py::object(py::none());
  return py::make_tuple(describe_node(node, numbers), seed);
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
    const auto leaf = std::find(graph.leaves.begin(), graph.leaves.end(), node);
    const auto slot = leaf != graph.leaves.end() ? leaf - graph.leaves.begin() : -1;
    fills.append(py::make_tuple(describe_meta(meta), to_python(node->args[1].value), describe_frame(node->frame), slot,
                                node->placement));
  }
  return fills;
}

void provide_fills(const Graph& graph, const std::vector<py::object>& buffers, const std::vector<uint32_t>& places) {
  const auto fills = graph.fills();
  TORCH_CHECK(fills.size() == buffers.size() && fills.size() == places.size(), "[fill] got ", buffers.size(),
              " buffers, expected ", fills.size());
  const RecorderLock lock;
  for (size_t i = 0; i < fills.size(); ++i) {
    fills[i]->buffer = py::object(buffers[i]).release().ptr();
    fills[i]->args.clear();
    fills[i]->placement = places[i];
  }
}

py::list describe_members(const std::vector<Members>& packs) {
  py::list found;
  for (const auto& [leaves, outputs] : packs) {
    found.append(py::make_tuple(py::tuple(py::cast(leaves)), py::tuple(py::cast(outputs))));
  }
  return found;
}

// A function of a graph that nothing has run meanwhile.
template <class Function>
auto checked(Function function) {
  return [function](Graph& graph) {
    graph.check();
    return function(graph);
  };
}

}  // namespace

void bind_graphs(py::module_& m) {
  py::register_exception<StaleGraph>(m, "StaleGraph");
  py::class_<Packing>(m, "Packing")
      .def(py::init([](Graph& graph) {
        graph.check();
        return Packing(graph);
      }))
      .def_property_readonly("packs", [](const Packing& packing) { return describe_members(packing.packs); })
      .def("result_metas", [](const Packing& packing, const Graph& g) {
        py::list metas;
        const auto meta = [&](uint32_t output) -> const Meta& {
          return g.outputs[output].node->meta(g.outputs[output].index);
        };
        for (size_t k = 0; k < packing.packs.size(); ++k) {
          const auto& outputs = packing.packs[k].outputs;
          if (outputs.empty()) {
            continue;
          }
          std::vector<int64_t> sizes(1);
          for (const auto output : outputs) {
            sizes[0] += packing.layouts[k]->stacked ? 1 : meta(output).numel();
          }
          if (packing.layouts[k]->stacked) {
            sizes.insert(sizes.end(), meta(outputs[0]).sizes.begin(), meta(outputs[0]).sizes.end());
          }
          metas.append(py::make_tuple(py::tuple(py::cast(sizes)), dtype_object(meta(outputs[0]).dtype)));
        }
        for (uint32_t i = 0; i < packing.results.size(); ++i) {
          if (packing.results[i].pack < 0) {
            metas.append(describe_meta(meta(i)));
          }
        }
        return metas;
      });
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
                             [](Graph& g) {
                               g.check();
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
      .def_property_readonly("leaf_places",
                             [](const Graph& g) {
                               py::list places;
                               for (const auto& leaf : g.leaves) {
                                 places.append(leaf->placement);
                               }
                               return places;
                             })
      .def_property_readonly("wanted_places", [](const Graph& g) { return py::list(py::cast(g.wanted)); })
      .def_property_readonly("resting", &Graph::resting)
      .def_property(
          "stacks", [](const Graph& g) { return describe_members(g.stacks); },
          [](Graph& g, const std::vector<std::pair<std::vector<uint32_t>, std::vector<uint32_t>>>& stacks) {
            g.stacks.clear();
            for (const auto& [leaves, outputs] : stacks) {
              g.stacks.push_back({leaves, outputs});
            }
          })
      .def("describe_nodes", checked(&describe_nodes))
      .def("describe_node", &describe_one)
      .def("leaf_locations", &leaf_locations)
      .def_property_readonly("number_places",
                             checked([](Graph& g) { return py::tuple(py::cast(g.sharing()->places)); }))
      .def("packed_numbers", checked(&packed_numbers))
      .def("describe_fills", &describe_fills)
      .def("provide_fills",
           [](Graph& g, const std::vector<py::object>& buffers, const std::vector<uint32_t>& places) {
             g.check();
             provide_fills(g, buffers, places);
           })
      .def("execute", [](Graph& g, Program& program) { return execute(g, program); })
      .def_property_readonly("has_fills", [](const Graph& g) { return g.has_fills(); })
      .def_property_readonly("fits_host", checked([](Graph& g) { return g.fits_host(); }))
      .def_property_readonly("is_small_part", checked([](Graph& g) { return is_small_part(g); }))
      .def("divide",
           [](Graph& g, const Cut& what) {
             g.check();
             std::vector<Cut> cuts;
             if (auto division = divide(g, what)) {
               if (!division->before.values.empty()) {
                 cuts.push_back(std::move(division->before));
               }
               cuts.push_back(std::move(division->rest));
             }
             return cuts;
           })
      .def_property_readonly("unheld_bytes", &Graph::unheld_bytes)
      .def("constants_vary", checked([](Graph& g) { return g.constants_vary(); }))
      .def("clear", &Graph::clear)
      .def("halves", &Graph::halves)
      .def("abandon", &Graph::abandon, py::arg("error"), py::arg("failed_nodes") = std::vector<size_t>(),
           py::arg("failed_fills") = std::vector<size_t>());
  py::class_<OperatorRun>(m, "OperatorRun")
      .def(py::init<Graph&, py::object, const std::optional<std::vector<at::Tensor>>&>(), py::arg("graph"),
           py::arg("rule"), py::arg("leaves") = py::none(), py::keep_alive<1, 2>())
      .def_readwrite("request", &OperatorRun::request)
      .def_property_readonly("graph", &OperatorRun::graph, py::return_value_policy::reference)
      .def_property_readonly("interrupted", &OperatorRun::interrupted)
      .def("start", &OperatorRun::start)
      .def("finish", &OperatorRun::finish)
      .def_property_readonly("position", &OperatorRun::position);
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
      .def_static("of_capture", [](int device) { return Cut::of_capture(static_cast<c10::DeviceIndex>(device)); })
      .def("graph", &Cut::graph)
      .def("preview", &Cut::preview)
      .def("needed", &Cut::needed)
      .def_property_readonly("device", [](const Cut& c) { return static_cast<int>(c.device); })
      .def_readwrite("again", &Cut::again);
  m.def("node_sequence", &node_sequence);
  m.def(
      "has_pending",
      [](int device, uint64_t until) { return has_pending(static_cast<c10::DeviceIndex>(device), until); },
      py::arg("device"), py::arg("until") = Cut::kNow);
  m.def("demote_numbers", [](const std::string& name, const std::string& overload, const std::vector<size_t>& places) {
    auto& info = op_info(name.c_str(), overload.c_str());
    bool changed = false;
    for (const auto place : places) {
      changed = info.demote(place) || changed;
    }
    return changed;
  });
}

}  // namespace torch_xla
