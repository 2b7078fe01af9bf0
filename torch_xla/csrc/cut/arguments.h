// What one run binds to a program. A cut gives it along with the program's structure (`Graph`); a replay finds it
// without a cut (`run/captured.h`).
#pragma once
#include "cut/scalar_layout.h"
#include "tensor/source.h"

namespace torch_xla {

class Arguments {
 public:
  // Where a result is: a buffer of its own (a new reference, stolen) or a place of a source.
  struct Result {
    PyObject* buffer = nullptr;
    c10::intrusive_ptr<Source> source;
    uint32_t source_index = 0;
    uint32_t placement = kReplicated;

    // The leaf that has it from now on.
    void give_to(Node& leaf) {
      leaf.buffer = std::exchange(buffer, nullptr);
      leaf.source = std::move(source);
      leaf.source_index = source_index;
      leaf.placement = placement;
    }
  };

  virtual ~Arguments() = default;

  c10::DeviceIndex device = 0;
  Vector<NodePtr> leaves;        // per input of the program
  std::vector<size_t> unfilled;  // those that there was no room to fill
  Vector<NumberSlot> numbers;    // scalars and seeds

  // To be called before the program is started. Throws if it cannot be run with them any more.
  virtual void begin() {}
  // Gives the results of the run, one per output of the program, to the tensors that wait for them.
  virtual void attach(Vector<Result> results) = 0;

 protected:
  Arguments() = default;
  Arguments(Arguments&&) = default;
  Arguments& operator=(Arguments&&) = default;
};

}  // namespace torch_xla
