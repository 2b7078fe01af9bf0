#include "bindings/bindings.h"
#include "bindings/describe.h"
#include "cut/graph.h"
#include "tensor/placeholder.h"
#include "tensor/placement.h"
#include "tensor/tensor_impl.h"

namespace torch_xla {

namespace {

uint64_t tensor_id(const at::Tensor& tensor) {
  TORCH_CHECK(is_xla(tensor), "[tensor] got a tensor on ", tensor.device(), ", expected one on xla");
  const RecorderLock lock;
  return impl_of(tensor)->alias.storage->id;
}

// Frees the memory of an xla storage, or gives it some.
void resize_storage(const at::Storage& storage, int64_t bytes) {
  auto* const ours = dynamic_cast<Storage*>(storage.unsafeGetStorageImpl());
  TORCH_CHECK(ours != nullptr && bytes >= 0, "[storage] got resize_(", bytes, ") of a storage on ", storage.device(),
              ", expected one on xla and no less than 0 bytes");
  Vector<Value> replaced;
  const RecorderLock lock;
  ours->resize(static_cast<size_t>(bytes), {}, replaced);
}

py::list live_tensors(c10::DeviceIndex device) {
  std::vector<std::tuple<MetaRef, bool, Frame>> live;
  {
    const RecorderLock lock;
    for_each_storage(device, [&](Storage& s) {
      const auto& node = *s.value.node;
      if (node.has_value()) {
        live.emplace_back(s.meta, !node.leaf(), node.frame);
      }
    });
  }
  return listed(live, [](const auto& tensor) {
    const auto& [meta, pending, frame] = tensor;
    return py::make_tuple(describe_meta(*meta), pending, frame);
  });
}

// A tensor for each living storage of a device: all of its memory.
std::vector<at::Tensor> bases_on(c10::DeviceIndex device) {
  std::vector<StoragePtr> living;
  std::vector<Alias> bases;
  {
    const RecorderLock lock;
    for_each_storage(device, [&](Storage& storage) {
      const auto& s = living.emplace_back(alive(storage));
      if (s && s->value.node->has_value()) {
        bases.push_back(memory_alias(s, s->meta));
      }
    });
  }
  std::vector<at::Tensor> tensors;
  for (auto& base : bases) {
    tensors.push_back(make_tensor(std::move(base)));
  }
  return tensors;
}

}  // namespace

void bind_tensors(py::module_& m) {
  m.def("buffer_of", [](const at::Tensor& t) {
    auto* const buffer = buffer_of(t);
    return buffer != nullptr ? py::reinterpret_steal<py::object>(buffer) : py::object(py::none());
  });
  m.def("location_of", [](const at::Tensor& t) { return describe_location(location_of(t)); });
  m.def("copy_on_host", &copy_on_host);
  m.def("fill_tensors", &fill_tensors);
  m.def("upload_eagerly", &upload_eagerly);
  m.def(
      "tensor_of",
      [](const py::object& buffer, const std::vector<int64_t>& sizes, at::ScalarType dtype, c10::DeviceIndex device,
         uint32_t placement) {
        const auto meta = contiguous_meta(sizes, dtype);
        auto leaf = make_leaf(meta, py::object(buffer).release().ptr());
        leaf.node->placement = placement;
        return make_tensor(std::move(leaf), meta, device);
      },
      py::arg("buffer"), py::arg("sizes"), py::arg("dtype"), py::arg("device"), py::arg("placement") = 0);
  m.def("placeholder", [](const std::vector<int64_t>& sizes, at::ScalarType dtype, c10::DeviceIndex device) {
    return make_placeholder(contiguous_meta(sizes, dtype), device);
  });
  m.def("set_placement", &set_placement, py::arg("tensor"), py::arg("placement"), py::arg("recorded") = false);
  m.def("replace_buffer", [](const at::Tensor& t, const py::object& buffer, uint32_t placement) {
    replace_buffer(t, py::object(buffer).release().ptr(), placement);
  });
  m.def("placement_of", &placement_of);
  m.def("is_placeholder", py::overload_cast<const at::Tensor&>(&is_placeholder));
  m.def("tensor_id", &tensor_id);
  m.def("set_buffer_donor", &set_buffer_donor);
  m.def("is_buffer_donor", &is_buffer_donor);
  m.def("is_lost", &is_lost);
  m.def("storage_generation", [](const at::Tensor& t) {
    const RecorderLock lock;
    return impl_of(t)->alias.storage->generation;
  });
  m.def("base_of", &base_of);
  m.def("bases_on", &bases_on);
  m.def("set_scope_of", [](const at::Tensor& t, const std::string& path) {
    const auto scope = scope_of(path);
    const RecorderLock lock;
    auto& node = *impl_of(t)->alias.current().node;
    if (!node.leaf()) {
      node.scope = scope;
    }
    return !node.leaf();
  });
  m.def("set_storage",
        [](const at::Tensor& t, const at::Storage& storage, int64_t offset, const std::vector<int64_t>& sizes,
           const std::vector<int64_t>& strides) { set_storage(t, storage, offset, sizes, strides); });
  m.def("resize_storage", &resize_storage);
  m.def("live_tensors", &live_tensors);
  m.def("drain_released", &drain_released);
  m.def("has_xla_type", &has_xla_type);
  m.def("created_tensors", &created_tensors);
  m.def("destroyed_tensors", &destroyed_tensors);
}

}  // namespace torch_xla
