#include "run/op_by_op.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>

#include <limits>
#include <numeric>
#include <string_view>
#include <unordered_set>

#include "base/kernel_settings.h"
#include "base/metric.h"
#include "base/no_warnings.h"
#include "base/python_hooks.h"
#include "base/tensors_of.h"
#include "cut/host_partition.h"
#include "ir/op_info.h"
#include "run/host_operators.h"
#include "run/kernel_thread.h"
#include "run/leaf_values.h"
#include "tensor/placement.h"

namespace torch_xla {
namespace {

using at::Tensor;

Metric& operators_time() {
  static auto& time = metric("OperatorsTime");
  return time;
}

}  // namespace

// The values of a graph while it runs: leaves, then the results of each node. One goes with its last reader.
class OpByOpRun::Run {
 public:
  Run(const Graph& graph, const py::object& rule, const std::optional<std::vector<Tensor>>& leaves,
      const Collectives& collectives)
      : graph_(graph), rule_(rule), collectives_(collectives) {
    auto count = static_cast<uint32_t>(graph.leaves.size());
    for (const auto& node : graph.nodes) {
      first_.push_back(count);
      count += static_cast<uint32_t>(node->outs->metas.size());
    }
    readers_.assign(count, 0);
    for (size_t i = 0; i < graph.nodes.size(); ++i) {
      for (const auto& edge : graph.edges_of(i)) {
        ++readers_[inputs_.emplace_back(index_of(edge))];
      }
    }
    for (const auto& output : graph.results) {
      ++readers_[outputs_.emplace_back(index_of(output))];
    }
    values_.resize(count);
    for (size_t i = 0; i < graph.leaves.size(); ++i) {
      values_[i] = leaves ? leaves->at(i) : values_of(graph.leaves[i], i, graph.device);
      owned_memory_.insert(values_[i].storage().data());
    }
  }

  bool has_kernels() const {
    const auto without = std::count_if(graph_.nodes.begin(), graph_.nodes.end(), [](const NodePtr& node) {
      const auto& host = host_operator(*node->op);
      return host.alternate == nullptr && !has_kernel(*node, host);
    });
    return without == static_cast<std::ptrdiff_t>(collectives_.size());
  }

  // Computes what is left, outputs too, until an operator needs Python or raises: in a thread that has no Python.
  void compute() {
    const Computing scope;
    try {
      while (at_ < graph_.nodes.size() && step(&Run::without_rule)) {
      }
      without_kernel_ = at_;
      if (at_ == graph_.nodes.size()) {
        end();
      }
    } catch (const c10::Error&) {
      refusal_ = std::current_exception();
    } catch (...) {
    }  // raised again where it can be told
  }

  void compute_next() {
    const Computing scope;
    if (at_ < graph_.nodes.size()) {
      step(&Run::results_of);
    } else {
      end();
    }
  }

  bool ended() const { return ended_; }
  const std::vector<Tensor>& results() const { return results_; }
  size_t position() const { return at_; }

  void raise_as_kernel(std::vector<Tensor>& inputs) {
    const auto& node = *graph_.nodes[at_];
    const auto expected = graph_.edges_of(at_).size();
    TORCH_CHECK(inputs.size() == expected, "[run] got ", inputs.size(), " inputs, expected ", expected);
    const auto count = values_.size();
    const auto restored = c10::make_scope_exit([&] { values_.resize(count); });
    std::vector<uint32_t> indices(inputs.size());
    std::iota(indices.begin(), indices.end(), static_cast<uint32_t>(count));
    values_.insert(values_.end(), inputs.begin(), inputs.end());
    by_kernel(node, indices);
  }

  Vector<Arguments::Result> take_results() {
    Vector<Arguments::Result> results;
    for (size_t i = 0; i < results_.size(); ++i) {
      auto& result = results.emplace_back();
      result.source = c10::make_intrusive<HostValues>(std::move(results_[i]), graph_.device, /*immutable=*/true);
      if (!graph_.output_placements.empty()) {
        result.placement = graph_.output_placements[i] == kUnspecified ? kReplicated : graph_.output_placements[i];
      }
    }
    return results;
  }

 private:
  // A scope of kernels without autograd, autocast, modes and transforms, whatever the thread has switched on.
  struct Computing {
    Timed timed{operators_time()};
    c10::impl::ForceDispatchKeyGuard kernels{
        c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
        c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset};
    at::NoGradGuard no_gradients;
    NoWarnings no_warnings;
  };

  void end() {
    while (results_.size() < outputs_.size()) {
      results_.push_back(owned(values_[outputs_[results_.size()]]));
    }
    ended_ = true;
  }

  uint32_t index_of(const Structure::Edge& e) const { return e.leaf ? e.from : first_[e.from] + e.index; }

  void drop(uint32_t index) {
    if (--readers_[index] == 0) {
      values_[index].reset();
    }
  }

  // The values of a node's arguments. What a program takes as inputs are numbers here.
  HostStack arguments_of(const Node& node, const HostOperator& host, c10::ArrayRef<uint32_t> inputs) const {
    const auto in = [&](uint32_t index) {
      const auto& value = values_[index];
      const bool fits =
          host.takes_strides || (value.is_contiguous() && (value.storage_offset() == 0 || !host.addresses));
      return fits ? value : value.clone(at::MemoryFormat::Contiguous);
    };
    HostStack stack;
    stack.reserve(node.args.size());
    size_t next = 0;
    for (size_t p = 0; p < node.args.size(); ++p) {
      const auto& arg = node.args[p];
      switch (arg.kind) {
        case Arg::Kind::Input:
          stack.emplace_back(in(inputs[next++]));
          break;
        case Arg::Kind::Inputs: {
          c10::List<Tensor> list;
          for (uint32_t k = 0; k < arg.count; ++k) {
            list.push_back(in(inputs[next++]));
          }
          stack.emplace_back(std::move(list));
          break;
        }
        case Arg::Kind::OptInputs: {
          c10::List<std::optional<Tensor>> list;
          for (uint32_t k = 0; k < arg.count; ++k) {
            list.push_back((arg.value.toInt() >> k & 1) != 0 ? std::optional<Tensor>(in(inputs[next++]))
                                                             : std::nullopt);
          }
          stack.emplace_back(std::move(list));
          break;
        }
        default:
          stack.push_back(constant_argument(node, p));
      }
    }
    return stack;
  }

  // Computes the next node; false where `compute` cannot. It may run a signal handler, which computes all the rest.
  bool step(std::optional<HostResults> (Run::*compute)(const Node&, c10::ArrayRef<uint32_t>) const) {
    const auto position = at_;
    const auto node = graph_.nodes[position];
    const c10::ArrayRef<uint32_t> inputs(inputs_.data() + input_, graph_.edges_of(position).size());
    auto results = (this->*compute)(*node, inputs);
    if (!results || graph_.nodes.empty() || at_ != position) {
      return results.has_value();
    }
    keep(*node, first_[position], std::move(*results));
    refusal_ = nullptr;
    ++at_;
    input_ += inputs.size();
    for (const auto index : inputs) {
      drop(index);
    }
    return true;
  }

  std::optional<HostResults> results_of(const Node& node, c10::ArrayRef<uint32_t> inputs) const {
    try {
      if (refusal_) {
        std::rethrow_exception(refusal_);
      }
      if (auto results = without_kernel_ == at_ ? std::nullopt : without_rule(node, inputs)) {
        return results;
      }
    } catch (std::exception& error) {
      if (collectives_.count(at_) != 0 || !refuses_call(error) ||
          std::string_view(error.what()).find("can't allocate memory") != std::string::npos) {
        throw;
      }
    }
    return by_rule(at_, inputs);
  }

  std::optional<HostResults> without_rule(const Node& node, c10::ArrayRef<uint32_t> inputs) const {
    if (const auto found = collectives_.find(at_); found != collectives_.end()) {
      std::vector<Tensor> tensors;
      std::transform(inputs.begin(), inputs.end(), std::back_inserter(tensors), [&](auto i) { return values_[i]; });
      return run_collectives(found->second, tensors, node.outs->metas);
    }
    const auto& op = *node.op;
    if (op.view && op.inverse == Inverse::Shape &&
        op.self_overlap != SelfOverlap::Always) {  // whatever its input's strides
      if (const auto& base = values_[inputs[0]]; base.numel() == node.meta(0).numel()) {
        return HostResults{base.reshape(node.meta(0).sizes)};
      }
    }
    auto results = by_kernel(node, inputs);
    return results && matches_metas(node, *results) ? std::move(results) : std::nullopt;
  }

  static bool has_kernel(const Node& node, const HostOperator& host) {
    return !node.seeded && host.in_aten && node.op->op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  }

  std::optional<HostResults> by_kernel(const Node& node, c10::ArrayRef<uint32_t> inputs) const {
    const auto& op = node.op->op;
    const auto& host = host_operator(*node.op);
    auto stack = arguments_of(node, host, inputs);
    if (host.alternate != nullptr) {
      if (auto results = host.alternate(node, stack)) {
        return results;
      }
    }
    if (!has_kernel(node, host) || !(host.stays_in_bounds == nullptr || host.stays_in_bounds(stack)) ||
        !settings_match(node, host)) {
      return {};
    }
    promote_as_recorded(node, stack);
    HostResults written;
    for (const auto p : node.op->written) {  // a node stands for a value: its kernel writes to a copy
      stack[p] = with_tensors(stack[p], [&](const Tensor& t) { return written.emplace_back(t.clone()); });
    }
    const HostStack arguments = stack;  // some kernels give references to what they were given
    try {
      op.callBoxed(stack);
    } catch (const c10::Error&) {
      auto widened = written.empty() && !node.op->view ? in_float(arguments) : std::nullopt;
      if (!widened) {
        throw;
      }
      stack = std::move(*widened);
      op.callBoxed(stack);
    }
    if (!settings_match(node, host)) {
      return {};
    }
    HostResults results;
    for (size_t r = 0; r < stack.size(); ++r) {
      if (node.op->return_writes[r] < 0) {
        add(stack[r], results);
      }
    }
    results.append(written.begin(), written.end());
    return results;
  }

  bool settings_match(const Node& node, const HostOperator& host) const {
    return node.op->view || host.pointwise || settings_.matches(node.settings);
  }

  static void add(const c10::IValue& returned, HostResults& results) {
    if (returned.isTensorList()) {
      const auto tensors = returned.toTensorVector();
      results.insert(results.end(), tensors.begin(), tensors.end());
    } else {
      results.push_back(returned.isTensor() ? returned.toTensor() : Tensor());
    }
  }

  // Whether a kernel gave what was promised, as far as somebody reads it; some leave out statistics.
  bool matches_metas(const Node& node, const HostResults& results) const {
    const auto& metas = node.outs->metas;
    if (results.size() != metas.size()) {
      return false;
    }
    for (size_t k = 0; k < metas.size(); ++k) {
      if (readers_[first_[at_] + k] > 0 &&
          (!results[k].defined() || results[k].sizes() != c10::IntArrayRef(metas[k].sizes))) {
        return false;
      }
    }
    return true;
  }

  HostResults by_rule(size_t position, c10::ArrayRef<uint32_t> inputs) const {
    const py::gil_scoped_acquire gil;
    py::list tensors;
    for (const auto index : inputs) {
      tensors.append(values_[index]);
    }
    HostResults results;
    for (const auto& result : py::list(rule_(position, tensors))) {
      results.push_back(result.is_none() ? Tensor() : result.cast<Tensor>());
    }
    return results;
  }

  void keep(const Node& node, uint32_t first, HostResults results) {
    for (size_t k = 0; k < node.outs->metas.size(); ++k) {
      auto& value = results[k];
      if (readers_[first + k] == 0 || !value.defined()) {
        continue;
      }
      value = value.resolve_conj().resolve_neg();
      value = value.layout() == at::kStrided ? value : value.to_dense();
      values_[first + k] = value.scalar_type() == node.meta(k).dtype ? std::move(value) : value.to(node.meta(k).dtype);
    }
  }

  // The value in memory that nobody else has.
  Tensor owned(const Tensor& value) {
    const auto& storage = value.storage();
    if (value.is_contiguous() && storage.nbytes() == value.nbytes() && owned_memory_.insert(storage.data()).second) {
      return value;
    }
    return value.clone(at::MemoryFormat::Contiguous);
  }

  const Graph& graph_;
  const py::object& rule_;
  const Collectives& collectives_;
  size_t at_ = 0;     // the next node
  size_t input_ = 0;  // and its first input
  const KernelSettings settings_;
  std::vector<uint32_t> first_;   // result of each node
  std::vector<uint32_t> inputs_;  // of all nodes, one after another
  std::vector<uint32_t> outputs_;
  std::vector<uint32_t> readers_;
  std::vector<Tensor> values_;
  std::vector<Tensor> results_;                                 // of the graph
  std::exception_ptr refusal_;                                  // what the kernel of the next node said
  size_t without_kernel_ = std::numeric_limits<size_t>::max();  // the node whose kernel did not do as recorded
  bool ended_ = false;
  std::unordered_set<const void*> owned_memory_;  // memory of leaves and of results
};

OpByOpRun::OpByOpRun(Graph& graph, py::object rule, const std::optional<std::vector<Tensor>>& leaves,
                     Collectives collectives)
    : graph_(graph), rule_(std::move(rule)), collectives_(std::move(collectives)) {
  graph.keep_clones_of_donors();
  fetch_fills(graph.leaves, graph.unfilled);
  graph.check();  // Python code may have run
  run_ = std::make_shared<Run>(graph, rule_, leaves, collectives_);
}

size_t OpByOpRun::position() const { return run_ != nullptr ? run_->position() : 0; }

bool OpByOpRun::has_kernels() const { return run_->has_kernels(); }

OpByOpRun::~OpByOpRun() { let_go(); }

void OpByOpRun::let_go() {
  if (task_.valid() && is_lost()) {
    new std::shared_ptr<Run>(std::move(run_));  // in the midst of an operator, for ever
  } else if (task_.valid()) {
    const py::gil_scoped_release unlocked;
    task_.wait();
  }
  task_ = {};
  run_ = nullptr;
}

void OpByOpRun::check() try {
  if (!done()) {
    graph_.begin();
  }
} catch (const StaleGraph&) {
  let_go();
  graph_.clear();
  throw;
}

bool OpByOpRun::start() {
  if (done()) {  // a signal handler has finished it
    return true;
  }
  check();
  if (!run_->has_kernels() || !graph_.begin_async()) {
    return false;
  }
  begin();
  return true;
}

void OpByOpRun::begin() {
  process_ = getpid();
  task_ = start_in_kernel_thread([run = run_, threads = at::get_num_threads()]() mutable {
    if (at::get_num_threads() != threads) {
      at::set_num_threads(threads);
    }
    run->compute();
    run = nullptr;  // its values
  });
}

void OpByOpRun::raise_as_kernel(std::vector<Tensor> inputs) {
  const py::gil_scoped_release unlocked;
  run_->raise_as_kernel(inputs);
}

const std::vector<Tensor>& OpByOpRun::values() {
  for (const py::gil_scoped_release unlocked; !run_->ended(); run_->compute_next()) {
  }
  return run_->results();
}

void OpByOpRun::finish() {
  interrupted_ = false;
  check();
  if (task_.valid() && is_lost()) {
    let_go();
    run_ = std::make_shared<Run>(graph_, rule_, std::nullopt, collectives_);
  }
  const auto run = run_;  // a signal handler may finish it
  const bool here = !task_.valid() && collectives_.empty() && (graph_.fits_host() || fits_host_partition(graph_));
  while (!done()) {
    if (!here) {
      wait();
    }
    const py::gil_scoped_release unlocked;
    const SingleThreaded alone;
    if (here) {
      run->compute();
    }
    if (done() || run->ended()) {
      break;
    }
    run->compute_next();
  }
  if (!done()) {
    check();
    graph_.attach(run->take_results());
  }
  run_ = nullptr;  // its values
}

void OpByOpRun::wait() {
  if (!task_.valid()) {
    begin();
  }
  for (auto task = task_; task.valid(); task = task_) {  // a signal handler may have finished it
    bool ended = false;
    {
      const py::gil_scoped_release unlocked;
      ended = task.wait_for(std::chrono::milliseconds(100)) == std::future_status::ready;
    }
    if (ended) {
      task_ = {};
    } else if (PyErr_CheckSignals() != 0) {
      interrupted_ = true;
      throw py::error_already_set();
    }
  }
}

}  // namespace torch_xla
