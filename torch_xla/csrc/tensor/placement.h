// Placements of values on a device that stands for several (SPMD). A placement is a number; Python has its sharding.
#pragma once
#include <ATen/core/Tensor.h>

#include "tensor/source.h"
#include "tensor/storage.h"

namespace torch_xla {

// Values still on the host, which go to the device when a program takes them: it may never do, and by then it is known
// how they are split.
struct HostValues final : Source {
  HostValues(at::Tensor v, c10::DeviceIndex d, bool k = false)
      : Source(Kind::HostValues), values(std::move(v)), device(d), immutable(k) {}
  void fetch(const NodePtr& leaf) override;
  Location find(const Node& /*leaf*/) const override { return {nullptr, -1, &values}; }
  const at::Tensor values;
  const c10::DeviceIndex device;
  const bool immutable;  // in memory that nobody writes to, so that it need not be copied
};

// The leaf of a CPU tensor that goes to a device: to where `placement` says, if it says anything.
Value make_upload(const MetaRef& meta, const at::Tensor& cpu, c10::DeviceIndex device,
                  uint32_t placement = kUnspecified);

// A new tensor with these values, in some order in memory. No operator makes it: what a thread uploads while another
// one captures is no part of that graph.
at::Tensor uploaded(const at::Tensor& cpu, const std::vector<int64_t>& strides, c10::DeviceIndex device);

// From now on no values wait on the host, because not all of them may fit the type that devices keep them in.
void upload_eagerly();

// `value` with the placement of the storage, which is about to get it.
Value with_storage_placement(Storage& storage, Value value);

// Sets a tensor's placement. False where its value is computed and has another one: the caller then replaces the
// buffer, or with `recorded` the next program does.
bool set_placement(const at::Tensor& tensor, uint32_t placement, bool recorded = false);
// Gives a tensor the buffer that has its values with another placement (a new reference, stolen).
void replace_buffer(const at::Tensor& tensor, PyObject* buffer, uint32_t placement);
// The placement that a tensor has, or is to have.
uint32_t placement_of(const at::Tensor& tensor);

}  // namespace torch_xla
