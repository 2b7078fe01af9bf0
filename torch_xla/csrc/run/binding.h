// Arguments that are named instead of cut: a program that is known runs again, and nothing is recorded for it.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "run/program.h"

namespace torch_xla {

class Binding final : public Arguments {
 public:
  // Binds a program to the tensors that it takes, the scalars and seeds, and the tensors that its results become the
  // values of. Refuses what the program was not compiled for. An input that the program writes over, and that is more
  // than the old value of the result in its place, travels as a copy.
  Binding(std::shared_ptr<Program> program, const std::vector<at::Tensor>& inputs, Vector<NumberSlot> numbers,
          std::vector<at::Tensor> results);

  void attach(Vector<Result> results) override;
  Program& program() { return *program_; }

 private:
  void check_results() const;
  std::vector<size_t> written_for_others() const;

  std::shared_ptr<Program> program_;
  std::vector<at::Tensor> results_;
};

}  // namespace torch_xla
