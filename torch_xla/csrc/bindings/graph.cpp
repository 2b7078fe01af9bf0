#include "cut/graph.h"

#include <pybind11/numpy.h>
#include <torch/csrc/DynamicTypes.h>

#include "bindings/bindings.h"
#include "bindings/describe.h"
#include "cut/host_partition.h"
#include "cut/packing.h"
#include "ir/op_info.h"
#include "run/in_flight.h"
#include "run/op_by_op.h"
#include "run/program.h"

namespace torch_xla {

namespace {

// Makes a node of a graph by the classes that Python has: `Node`, `Edge`, `Input`, `Number` and `Meta`. Code of
// Python's runs meanwhile, and perhaps a signal handler that cuts again, or ends the run of this graph: what that
// changes is copied.
class NodeDescription {
 public:
  NodeDescription(const Graph& graph, size_t position, const py::tuple& classes)
      : classes_(classes),
        node_(graph.nodes.at(position)),
        op_(*node_->op),
        args_(node_->args),
        attrs_(argument_hash(*node_)),
        edges_(graph.edges_of(position).begin(), graph.edges_of(position).end()) {
    const auto earlier = [&](const NumberSlot& slot) { return slot.node < position; };
    for (auto slot = std::partition_point(graph.numbers.begin(), graph.numbers.end(), earlier);
         slot != graph.numbers.end() && slot->node == position; ++slot) {
      numbers_.push_back({slot->position, slot->element});
    }
  }

  py::object node() {
    const auto& n = *node_;
    py::list args;
    for (uint32_t i = 0; i < args_.size(); ++i) {
      args.append(argument(i));
    }
    const auto edge = [&](const Structure::Edge& e) { return classes_[1](e.leaf, e.from, e.index); };
    const auto meta = [&](const Meta& m) { return m.defined() ? classes_[4](*describe_meta(m)) : py::none(); };
    return classes_[0](op_.name, py::tuple(args), py::tuple(listed(edges_, edge)),
                       py::tuple(listed(n.outs->metas, meta)), n.seeded, n.frame, py::make_tuple(attrs_.hi, attrs_.lo),
                       n.scope, n.settings);
  }

 private:
  py::object argument(uint32_t position) {
    const auto& [kind, count, value] = args_[position];
    if (kind == Arg::Kind::Input) {
      return input();
    }
    if (kind == Arg::Kind::Inputs || kind == Arg::Kind::OptInputs) {
      py::list list;
      for (uint32_t i = 0; i < count; ++i) {
        list.append(kind == Arg::Kind::Inputs || (value.toInt() >> i & 1) != 0 ? input() : py::none());
      }
      return list;
    }
    if (!has_number(position)) {
      return constant(value, position);
    }
    const bool varied = op_.policy(position) != NumberPolicy::Input;
    if (value.isList()) {
      uint32_t element = 0;
      return listed(value.toListRef(), [&](const c10::IValue& e) {
        return is_next(position, element++) ? number(e, position, true) : to_python(e);
      });
    }
    return number(value, position, varied);
  }

  bool has_number(uint32_t position) const { return next_ < numbers_.size() && numbers_[next_].first == position; }
  bool is_next(uint32_t position, uint32_t element) const {
    return has_number(position) && numbers_[next_].second == element;
  }
  py::object input() { return classes_[2](inputs_++); }
  // `varied`: whether it was a constant before.
  py::object number(const c10::IValue& value, uint32_t position, bool varied) {
    return classes_[3](next_++, to_python(value), position, varied);
  }

  // What is an enumeration in Python is a whole number here, and only the schema tells.
  py::object constant(const c10::IValue& value, size_t position) const {
    const auto& declared = op_.op.schema().arguments();
    if (!value.isInt() || position >= declared.size()) {
      return to_python(value);
    }
    const auto& type = declared[position].real_type();
    const auto optional = type->cast<c10::OptionalType>();
    switch ((optional ? optional->getElementType() : type)->kind()) {
      case c10::TypeKind::ScalarTypeType:
        return py::cast(value.toScalarType());
      case c10::TypeKind::LayoutType:
        return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPLayout(value.toLayout())));
      case c10::TypeKind::MemoryFormatType:
        return py::cast(value.toMemoryFormat());
      default:
        return to_python(value);
    }
  }

  const py::tuple classes_;
  const NodePtr node_;
  const OpInfo& op_;
  const Args args_;
  const Hash attrs_;
  const c10::SmallVector<Structure::Edge, 3> edges_;
  Vector<std::pair<uint32_t, uint32_t>> numbers_;  // its numbers: of which argument, of a list which element
  size_t next_ = 0;                                // of them
  size_t inputs_ = 0;                              // so far
};

py::list describe_nodes(const Graph& graph, const py::tuple& classes) {
  py::list nodes;
  for (size_t i = 0, count = graph.nodes.size(); i < count; ++i) {
    nodes.append(NodeDescription(graph, i, classes).node());
  }
  return nodes;
}

// One node of a graph by itself, and its seed and offset if it draws.
py::tuple describe_node(const Graph& graph, size_t position, const py::tuple& classes) {
  const auto node = graph.nodes.at(position);
  auto seed = node->seeded ? py::object(py::make_tuple(node->seed[0], node->seed[1])) : py::object(py::none());
  return py::make_tuple(NodeDescription(graph, position, classes).node(), seed);
}

py::list leaf_locations(Graph& graph) {
  py::list locations;
  fetch_fills(graph.leaves, graph.unfilled);
  for (const auto& leaf : graph.leaves) {
    auto location = locate(leaf);
    TORCH_CHECK(location.buffer != nullptr, "[run] input ", locations.size(), " has no buffer");
    Py_INCREF(location.buffer);
    locations.append(describe_location(location));
  }
  return locations;
}

// The numbers of the graph as one vector per type.
py::list packed_numbers(Graph& graph) {
  size_t type = 0;
  const auto array = [&](const std::string& bytes) { return number_array(type++, bytes); };
  return listed(graph.scalar_layout()->pack(graph.numbers), array);
}

py::list describe_members(const std::vector<Members>& packs) {
  return listed(packs, [](const Members& m) {
    return py::make_tuple(py::tuple(py::cast(m.leaves)), py::tuple(py::cast(m.outputs)));
  });
}

void bind_packing(py::module_& m) {
  py::class_<Packing>(m, "Packing")
      .def(py::init<const Graph&>())
      .def_property_readonly("packs", [](const Packing& packing) { return describe_members(packing.packs); });
}

// What a graph is: its parts as lists.
void bind_parts(py::class_<Graph>& graph) {
  const auto of_leaves = [](auto describe) {
    return
        [describe](const Graph& g) { return listed(g.leaves, [&](const NodePtr& leaf) { return describe(*leaf); }); };
  };
  graph.def_property_readonly("key", [](const Graph& g) { return hex(g.key); })
      .def_readonly("device", &Graph::device)
      .def_property_readonly("num_nodes", [](const Graph& g) { return g.nodes.size(); })
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
      .def_readonly("aliased_outputs", &Graph::aliased_outputs)
      .def_property_readonly("outputs",
                             [](const Graph& g) {
                               return listed(g.results,
                                             [](const Structure::Edge& e) { return py::make_tuple(e.from, e.index); });
                             })
      .def_property_readonly("leaf_metas", of_leaves([](const Node& leaf) { return describe_meta(leaf.meta(0)); }))
      .def_property_readonly(
          "output_metas",
          [](const Graph& g) { return listed(g.results, [&](const auto& e) { return describe_meta(g.meta(e)); }); })
      .def_property_readonly("leaf_frames", of_leaves([](const Node& leaf) { return py::cast(leaf.frame); }))
      .def_property_readonly("leaf_placements", of_leaves([](const Node& leaf) { return leaf.placement; }))
      .def_property_readonly("output_placements",
                             [](const Graph& g) { return py::list(py::cast(g.output_placements)); })
      .def_property_readonly("resident_stacks", &Graph::resident_stacks)
      .def_property(
          "stacks", [](const Graph& g) { return describe_members(g.stacks); },
          [](Graph& g, const std::vector<std::pair<std::vector<uint32_t>, std::vector<uint32_t>>>& stacks) {
            g.stacks.clear();
            for (const auto& [leaves, outputs] : stacks) {
              g.stacks.push_back({leaves, outputs});
            }
          })
      .def("describe_nodes", &describe_nodes)
      .def("describe_node", &describe_node)
      .def("leaf_locations", &leaf_locations)
      .def_property_readonly("number_indices", [](Graph& g) { return py::tuple(py::cast(g.scalar_layout()->indices)); })
      .def("packed_numbers", &packed_numbers)
      .def_property_readonly("has_collectives", &Graph::has_collectives)
      .def_readonly("unfilled", &Graph::unfilled)
      .def_property_readonly("unreferenced_bytes", &Graph::unreferenced_bytes);
}

// What is done with it.
void bind_acts(py::class_<Graph>& graph) {
  graph.def("execute", [](Graph& g, Program& program) { return execute(g, program); })
      .def_property_readonly("fits_host", &Graph::fits_host)
      .def_property_readonly("fits_host_partition", &fits_host_partition)
      .def("partition_for_host",
           [](const Graph& g, const Cut& what) {
             std::vector<Cut> cuts;
             if (auto partition = partition_for_host(g, what)) {
               if (!partition->before.values.empty()) {
                 cuts.push_back(std::move(partition->before));
               }
               cuts.push_back(std::move(partition->device));
             }
             return cuts;
           })
      .def("end_empty",
           [](Graph& g) {
             g.begin();
             g.attach({});
           })
      .def("constants_vary", &Graph::constants_vary)
      .def("bind", &Graph::bind)
      .def("cut_of", &Graph::cut_of)
      .def("roll_back", &Graph::roll_back, py::arg("error"), py::arg("failed_nodes") = std::vector<size_t>());
}

void bind_operator_runs(py::module_& m) {
  py::class_<OpByOpRun>(m, "OpByOpRun")
      .def(py::init<Graph&, py::object, const std::optional<std::vector<at::Tensor>>&, OpByOpRun::Collectives>(),
           py::arg("graph"), py::arg("rule"), py::arg("leaves") = py::none(),
           py::arg("collectives") = OpByOpRun::Collectives(), py::keep_alive<1, 2>())
      .def_readwrite("request", &OpByOpRun::request)
      .def_property_readonly("graph", &OpByOpRun::graph, py::return_value_policy::reference)
      .def_property_readonly("interrupted", &OpByOpRun::interrupted)
      .def_property_readonly("has_kernels", &OpByOpRun::has_kernels)
      .def("start", &OpByOpRun::start)
      .def("finish", &OpByOpRun::finish)
      .def("values", &OpByOpRun::values)
      .def("raise_as_kernel", &OpByOpRun::raise_as_kernel)
      .def_property_readonly("position", &OpByOpRun::position);
}

// A signal handler may have begun a run since the caller finished the one before.
Graph cut_beside_nothing(const Cut& what, Cut::Purpose purpose) {
  if (!InFlight::of(what.device).operator_run().is_none()) {
    throw StaleGraph();
  }
  return what.graph(purpose);
}

void bind_cuts(py::module_& m) {
  py::class_<Cut> cut(m, "Cut");
  py::enum_<Cut::Scope>(cut, "Scope")
      .value("NEEDED", Cut::Scope::kNeeded)
      .value("LIVE", Cut::Scope::kLive)
      .value("PENDING", Cut::Scope::kPending);
  py::enum_<Cut::Donate>(cut, "Donate")
      .value("NOTHING", Cut::Donate::kNothing)
      .value("DONORS", Cut::Donate::kDonors)
      .value("OVERWRITTEN", Cut::Donate::kOverwritten);
  cut.def_static("of_device", &Cut::of_device, py::arg("device"), py::arg("until") = Cut::kNow)
      .def_static("of_tensors", &Cut::of_tensors, py::arg("tensors"), py::arg("scope") = Cut::Scope::kNeeded,
                  py::arg("donate") = Cut::Donate::kNothing)
      .def_static("of_capture", &Cut::of_capture)
      .def("graph", [](const Cut& what) { return cut_beside_nothing(what, Cut::Purpose::kRun); })
      .def("question", [](const Cut& what) { return cut_beside_nothing(what, Cut::Purpose::kAsk); })
      .def("preview", [](const Cut& what) { return what.graph(Cut::Purpose::kShow); })
      .def("roots_only", &Cut::roots_only)
      .def_readonly("device", &Cut::device)
      .def_property_readonly(
          "is_lost", [](const Cut& cut) { return std::any_of(cut.tensors.begin(), cut.tensors.end(), &is_lost); });
}

}  // namespace

void bind_graphs(py::module_& m) {
  py::register_exception<StaleGraph>(m, "StaleGraph");
  bind_packing(m);
  py::class_<Graph> graph(m, "Graph");
  bind_parts(graph);
  bind_acts(graph);
  bind_operator_runs(m);
  bind_cuts(m);
  m.def("node_sequence", &node_sequence);
  m.def("has_pending", &has_pending, py::arg("device"), py::arg("until") = Cut::kNow);
  m.def("specialize_numbers",
        [](const std::string& name, const std::string& overload, const std::vector<size_t>& arguments) {
          auto& info = op_info(name.c_str(), overload.c_str());
          bool changed = false;
          for (const auto argument : arguments) {
            changed = info.specialize(argument) || changed;
          }
          return changed;
        });
}

}  // namespace torch_xla
