// What a graph is to be made of.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "ir/node.h"

namespace torch_xla {

class Graph;

struct Cut {
  enum class Scope : uint8_t {
    kNeeded,   // what the roots need
    kLive,     // the same, but each needed value that a live tensor has becomes a result too
    kPending,  // everything pending on the device
  };
  enum class Donate : uint8_t {
    kNothing,
    kDonors,       // buffers that the user donates
    kOverwritten,  // and those of overwritten tensors
  };
  static constexpr uint64_t kNow = std::numeric_limits<uint64_t>::max();

  c10::DeviceIndex device = 0;
  std::vector<at::Tensor> tensors{};  // the roots are the values of these,
  Vector<Value> values{};             // and these
  Scope scope = Scope::kNeeded;
  uint64_t until = kNow;  // a node sequence: of what is pending, what was recorded before it
  Donate donate = Donate::kNothing;
  // A graph that is to run at each replay: what was made from nothing is made anew by each, so it is no input.
  bool captured = false;

  static Cut of_device(c10::DeviceIndex device, uint64_t until = kNow);
  static Cut of_capture(c10::DeviceIndex device);
  // The device is that of the tensors; without any it is the first.
  static Cut of_tensors(const std::vector<at::Tensor>& tensors, Scope scope, Donate donate);

  // A cut that computes these tensors alone and donates nothing, if each tensor has one element; else none.
  std::optional<Cut> roots_only() const;

  // Why a graph is cut: to be run; to ask about it alone; or to be looked at as it stands, its
  // numbers not compared with those of earlier graphs.
  enum class Purpose : uint8_t { kRun, kAsk, kShow };
  // No value, and nothing that later graphs depend on, is changed before it is run; but fills become leaves, and views
  // forget what they know where it is to be run.
  Graph graph(Purpose purpose = Purpose::kRun) const;
};

}  // namespace torch_xla
