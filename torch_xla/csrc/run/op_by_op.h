// Running a graph operator by operator with PyTorch's CPU kernels: where it has no program, and may never get one.
#pragma once
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "cut/graph.h"
#include "run/collective_kernel.h"

namespace torch_xla {

// One run of a graph. `leaves` has a CPU tensor per leaf; without it the graph's device is the host, and they are read
// where they are.
//
// `rule` is a Python function that computes a node by its lowering rule, as a program does: what the CPU has no kernel
// for, and what its kernel refuses, so that no error depends on whether a graph is compiled. It takes the node's
// position and its inputs as CPU tensors, and gives a list of its results. `collectives` has those of the graph, by the
// positions of their nodes.
class OpByOpRun {
 public:
  using Collectives = std::map<size_t, CollectiveParts>;
  OpByOpRun(Graph& graph, py::object rule, const std::optional<std::vector<at::Tensor>>& leaves,
            Collectives collectives = {});
  OpByOpRun(const OpByOpRun&) = delete;
  OpByOpRun& operator=(const OpByOpRun&) = delete;
  ~OpByOpRun();

  // Throws StaleGraph where something computed what the graph is of meanwhile; it is over then. Asked by who has it run
  // (`InFlight`), and where it starts and ends: any Python code before may have been a signal handler's.
  void check();
  // Whether all of it has kernels. They may refuse their calls all the same.
  bool has_kernels() const;
  // Begins in the kernel thread, while the host records on; nothing else is cut there until it is finished. False where
  // that cannot be: of a graph that is no barrier's, or has an operator without a kernel, whose rule may fail.
  bool start();
  // Computes what is left, and gives the results to their tensors: a few small operators in the calling thread, what
  // needs Python there too, and the rest in the kernel thread. May be called again after an interrupt, and in a
  // signal handler that a call of it runs: what that has done the other leaves.
  void finish();
  // Computes what is left, for tests, and gives it to nobody.
  const std::vector<at::Tensor>& values();
  // Raises what the CPU kernel of the node that it has come to says of these inputs.
  void raise_as_kernel(std::vector<at::Tensor> inputs);
  // Whether its graph is empty: the results are attached, or what failed was taken out of the graph.
  bool done() const { return graph_.nodes.empty(); }
  // Whether the kernel thread has more to do.
  bool busy() const {
    return task_.valid() && !is_lost() && task_.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
  }
  // The node that it has come to.
  size_t position() const;

  // What it is run for, as Python knows it.
  py::object request = py::none();
  // Whether what `finish` raised came from a signal handler: the run goes on.
  bool interrupted() const { return interrupted_; }
  Graph& graph() { return graph_; }

 private:
  class Run;
  void begin();
  void wait();
  bool is_lost() const { return process_ != getpid(); }
  // Waits for the kernel thread, if it has more to do, and lets the values go.
  void let_go();

  Graph& graph_;
  bool interrupted_ = false;
  const py::object rule_;
  const Collectives collectives_;
  std::shared_ptr<Run> run_;
  std::shared_future<void> task_;
  pid_t process_ = 0;  // that started it; one that was forked since has no such thread
};

}  // namespace torch_xla
