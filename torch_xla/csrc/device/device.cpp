#include "device/device.h"

#include <ATen/detail/XLAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <utility>

#include "base/python_hooks.h"
#include "device/random.h"

namespace torch_xla {

namespace {

std::atomic<int> count{1};
std::atomic<int> own{0};
std::atomic<bool> mesh{false};
thread_local c10::DeviceIndex current = 0;

// One that was made without an index is of the device that is current when it is asked.
c10::DeviceIndex index_of(const c10::Stream& stream) {
  return stream.device().has_index() ? stream.device_index() : current;
}

struct XlaGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::XLA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto old = current;
    setDevice(device);
    return {c10::DeviceType::XLA, old};
  }
  c10::Device getDevice() const override { return {c10::DeviceType::XLA, current}; }
  void setDevice(c10::Device device) const override { current = device_index(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) {
      current = static_cast<c10::DeviceIndex>(known_index(device.index()));
    }
  }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high*/) const override { return getStream(device); }
  // XLA orders the work of a device itself: there is one stream.
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  bool queryStream(const c10::Stream& stream) const override { return query(index_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(index_of(stream)); }
  // An event is the device that it was recorded on: all that was recorded there counts as before it.
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/,
              c10::EventFlag /*flag*/) const override {
    destroyEvent(std::exchange(*event, new c10::DeviceIndex(index_of(stream))), -1);
  }
  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}
  bool queryEvent(void* event) const override {
    return event == nullptr || query(*static_cast<c10::DeviceIndex*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      synchronize(*static_cast<c10::DeviceIndex*>(event));
    }
  }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<c10::DeviceIndex*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& /*data*/, const c10::Stream& /*stream*/) const override {}
};

struct XlaHooks final : at::XLAHooksInterface {
  // PyTorch 2.11 gives an argument that says nothing, later versions none.
  template <typename... Unused>
  explicit XlaHooks(const Unused&... /*unused*/) {}

  void init() const override {}
  bool hasXLA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  std::string showConfig() const override { return "torch_xla on PJRT"; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto old = current;
    set_current_device(device);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  bool isPinnedPtr(const void* /*data*/) const override { return false; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
};

}  // namespace

bool spans_mesh() { return mesh.load(std::memory_order_relaxed); }
void set_spans_mesh(bool on) { mesh.store(on); }

void set_device_count(c10::DeviceIndex n) { count.store(n); }
c10::DeviceIndex device_count() { return static_cast<c10::DeviceIndex>(count.load(std::memory_order_relaxed)); }
c10::DeviceIndex current_device() { return current; }
void set_current_device(c10::DeviceIndex index) { current = device_index(c10::Device(c10::DeviceType::XLA, index)); }

void set_own_index(int index) { own.store(index); }
int known_index(int index) { return index == own.load(std::memory_order_relaxed) ? 0 : index; }

c10::DeviceIndex device_index(const std::optional<c10::Device>& device) {
  const auto index =
      device && device->has_index() ? static_cast<c10::DeviceIndex>(known_index(device->index())) : current_device();
  TORCH_CHECK(index < device_count(), "[device] got xla:", static_cast<int>(index),
              ", available are xla:0 to xla:", static_cast<int>(device_count()) - 1,
              "; CPU_NUM_DEVICES=n gives n CPU devices");
  return index;
}

C10_REGISTER_GUARD_IMPL(XLA, XlaGuard);

}  // namespace torch_xla

namespace at {
using torch_xla::XlaHooks;
// PyTorch looks the hooks up under this name.
C10_REGISTER_TYPED_CLASS(XLAHooksRegistry, "torch_xla::detail::XLAHooks", XlaHooks);
}  // namespace at
