// What the host computes sooner, with PyTorch's CPU kernels, than a program is compiled: by operators and values alone.
#pragma once
#include "ir/node.h"

namespace torch_xla {

struct HostCost {
  size_t operators = 0;  // of which it computes some 50,000 a second
  int64_t values = 0;    // of all their results

  void add(const Node& node) {
    ++operators;
    values += values_of(node);
  }
  bool within(const HostCost& most) const { return operators <= most.operators && values <= most.values; }
  static int64_t values_of(const Node& node) {
    int64_t values = 0;
    for (const auto& meta : node.outs->metas) {
      values += meta.defined() ? meta.numel() : 0;
    }
    return values;
  }
};

// A graph behind a read, with its inputs; one of views alone, as each other part of a tensor would be another program;
// and one without inputs, which is computed once, such as a check of all positions.
constexpr HostCost kHostGraph = {24, 16384};
constexpr HostCost kHostViews = {24, 1 << 18};
constexpr HostCost kHostConstants = {24, 1 << 20};
// A part of a larger graph that would be compiled again and again, as it grows.
constexpr HostCost kHostPart = {256, 32768};
// A mask whose number of elements is read while the step is recorded. One that takes more to make is a result of the
// step: that number is another in each step, so that each would want a program, and it would have to be waited for.
constexpr HostCost kHostMask = {8, 0};

}  // namespace torch_xla
