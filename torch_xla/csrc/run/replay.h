// A step that is known runs again: its program, what that reads, and what becomes of its results. No call is recorded
// and no graph is cut.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "cut/recording.h"
#include "run/program.h"

namespace torch_xla {

class Replay final : public Arguments {
 public:
  // Where a storage that the step reads or writes is found at each run.
  struct Place {
    enum class Where : uint8_t {
      Storage,   // one that lives on from run to run
      Argument,  // that of an argument
      Gradient,  // that of a parameter's gradient
      Fresh,     // a new one at each run
    } where;
    uint32_t index = 0;  // of the argument or parameter
    c10::weak_intrusive_ptr<Storage> storage;
    MetaRef meta;
  };
  // What an input of the program is.
  struct Input {
    enum class From : uint8_t { Place, Constant, Upload } from;
    uint32_t index = 0;
  };
  // A host tensor among the arguments that the step copies to the device.
  struct Upload {
    uint32_t argument = 0;
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
  };
  // A place that has another value afterwards: an output's, or the one that another place had.
  struct Write {
    uint32_t place = 0;
    int32_t output = -1;
    uint32_t from = 0;
  };
  // A tensor that the step makes; as one that it made while it was recorded.
  struct Made {
    Made() = default;
    Made(uint32_t place, const at::Tensor& like);
    uint32_t place = 0;
    ViewPath path;
    MetaRef meta;
  };
  struct Parameter {
    Watch::WeakTensor tensor;
    bool had_gradient = false;
    enum class Then : uint8_t { Keep, Clear, Make } then;
    Made made;  // its new gradient
  };
  struct Plan {
    std::vector<Place> places;
    std::vector<Input> inputs;  // per input of the program
    std::vector<at::Tensor> constants;
    std::vector<Upload> uploads;
    std::vector<Write> writes;
    std::vector<Parameter> parameters;
    std::vector<Made> results;
    std::vector<uint32_t> varying;  // numbers that each run is given
    std::vector<c10::VariableVersion> versions;
  };

  Replay(std::shared_ptr<Program> program, const Recording& recording, Plan plan);

  // Finds everything that a run needs; false, and `refused` says why, where something is not as it was. `values` are
  // those of the numbers that vary.
  bool prepare(const std::vector<at::Tensor>& arguments, const py::list& values);
  // Starts the prepared run; returns its token.
  py::object run();
  void attach(Vector<Result> results) override;
  // Hands out the tensors that the run made.
  std::vector<at::Tensor> take_results();
  void forget();

  Program& program() { return *program_; }
  const char* refused = "";

 private:
  const char* find_parameters();
  const char* find_places(const std::vector<at::Tensor>& arguments);
  const char* find_leaves();
  std::vector<size_t> written_for_others() const;
  void copy_leaves(const std::vector<size_t>& which);
  void replace(Storage& storage, Value value);
  at::Tensor make(const Made& made) const;

  std::shared_ptr<Program> program_;
  Plan plan_;
  std::vector<int32_t> place_of_output_;  // the first that gets it
  std::vector<bool> written_;             // per place
  std::unordered_set<const Storage*> lasting_;
  // Of the prepared run.
  std::vector<StoragePtr> storages_;  // per place
  std::vector<at::Tensor> parameters_;
  Vector<Value> moved_;  // per write that takes another place's value
  Vector<NodePtr> uploaded_;
  std::vector<c10::VariableVersion> versions_;
  Vector<Value> old_;  // to be destroyed without the lock
};

}  // namespace torch_xla
