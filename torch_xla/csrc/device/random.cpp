#include "device/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <deque>
#include <mutex>

#include "base/fork.h"

namespace torch_xla {

namespace {

class XlaGeneratorImpl final : public c10::GeneratorImpl {
 public:
  explicit XlaGeneratorImpl(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(c10::DeviceType::XLA, device), c10::DispatchKeySet(c10::DispatchKey::XLA)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(false));
    return seed_;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }

  // The state is two little-endian 64-bit words as a byte tensor, as on other devices.
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
    uint64_t words[2];
    std::memcpy(words, state.data(), sizeof(words));  // a part of a tensor may be anywhere
    seed_ = words[0];
    offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    const uint64_t words[2] = {seed_, offset_};
    std::memcpy(state.data_ptr<uint8_t>(), words, sizeof(words));
    return state.getIntrusivePtr();
  }
  uint64_t take() { return offset_++; }

 private:
  XlaGeneratorImpl* clone_impl() const override {
    auto* copy = new XlaGeneratorImpl(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

struct Device {
  at::Generator generator;
  bool has_own_state = false;  // it was given a state that is not of the program's seed
  std::optional<CapturedDraws> captured{};
};

// Does not move what it holds: PyTorch keeps references to the default generators.
std::deque<Device>& devices() {
  static auto* const d = new std::deque<Device>();
  return *d;
}
std::mutex& devices_mutex() {
  static auto* const m = new ForkSafe<std::mutex, LockOrder::Random>();
  return *m;
}

XlaGeneratorImpl& impl(const at::Generator& g) { return *static_cast<XlaGeneratorImpl*>(g.unsafeGetGeneratorImpl()); }

// torch.manual_seed and torch.set_rng_state know no hook for this device, so its state is a part of the CPU
// generator's: the seed, and how many numbers were drawn with it, in a field that seeding clears and that a saved state
// carries, the spare normal number of type float. CPU kernels draw normal numbers in double and keep theirs in the
// other field, so their numbers stay as they are.
class Host {
 public:
  Host() : generator_(at::detail::getDefaultCPUGenerator()), lock_(generator_.mutex()) {}
  uint64_t seed() const { return cpu().current_seed(); }
  std::optional<uint32_t> drawn() const {
    const auto mark = cpu().next_float_normal_sample();
    return mark ? std::optional(std::bit_cast<uint32_t>(*mark)) : std::nullopt;
  }
  void set_drawn(uint64_t number) {
    cpu().set_next_float_normal_sample(std::bit_cast<float>(static_cast<uint32_t>(number)));
  }

 private:
  at::CPUGeneratorImpl& cpu() const { return *at::check_generator<at::CPUGeneratorImpl>(generator_); }
  at::Generator generator_;
  std::lock_guard<std::mutex> lock_;
};

// What the host had when it was last looked at; of several devices, the number of the one that drew most.
struct HostState {
  uint64_t seed = 0;
  std::optional<uint32_t> drawn;
};
HostState last_host_state;

// Takes over what was made of the program's state since: a new seed, or a state that it had before.
void follow(Host& host) {
  const auto seed = host.seed();
  const auto drawn = host.drawn();
  if (drawn && last_host_state.drawn == drawn && last_host_state.seed == seed) {
    return;
  }
  for (auto& d : devices()) {
    if (!drawn || !d.has_own_state || seed != last_host_state.seed) {
      impl(d.generator).set_current_seed(seed);
      impl(d.generator).set_offset(drawn.value_or(0));
      d.has_own_state = false;
    }
  }
  host.set_drawn(drawn.value_or(0));
  last_host_state = {seed, drawn.value_or(0)};
}

// After a device's offset changed.
void note_drawn(Host& host, const Device& device, bool set) {
  const auto offset = static_cast<uint32_t>(impl(device.generator).get_offset());
  if (!device.has_own_state && (set || offset > *last_host_state.drawn)) {
    host.set_drawn(offset);
    last_host_state.drawn = offset;
  }
}

Device& device_state(c10::DeviceIndex index) {
  auto& all = devices();
  while (all.size() <= static_cast<size_t>(index)) {
    all.push_back({at::make_generator<XlaGeneratorImpl>(static_cast<c10::DeviceIndex>(all.size()))});
    impl(all.back().generator).set_current_seed(last_host_state.seed);
  }
  return all[index];
}

}  // namespace

void next_seed(c10::DeviceIndex device, const std::optional<at::Generator>& generator, int64_t seed[2]) {
  const std::lock_guard<std::mutex> lock(devices_mutex());
  auto& d = device_state(device);
  if (generator && generator->defined() && !(*generator == d.generator)) {
    TORCH_CHECK(!d.captured, "[graph] got random numbers of a generator of their own while a graph is captured, ",
                "expected the device's; leave generator out");
    if (generator->device().type() == c10::DeviceType::XLA) {
      seed[0] = static_cast<int64_t>(generator->current_seed());
      seed[1] = static_cast<int64_t>(impl(*generator).take());
      return;
    }
    // A host generator governs the numbers too: it gives the seed of this one draw.
    auto host = *generator;
    const std::lock_guard<std::mutex> generator_lock(host.mutex());
    seed[0] = static_cast<int64_t>(at::check_generator<at::CPUGeneratorImpl>(host)->random64());
    seed[1] = 0;
    return;
  }
  Host host;
  follow(host);
  seed[0] = static_cast<int64_t>(d.generator.current_seed());
  const auto offset = impl(d.generator).get_offset();
  if (d.captured) {
    auto& [first_seed, first, count] = *d.captured;
    TORCH_CHECK(
        d.generator.current_seed() == first_seed && first <= offset && offset - first <= count,
        "[graph] got another seed or random state while a graph is captured, expected the draws of each replay ",
        "to go on from the ones before; seed before the capture");
    count = std::max(count, offset + 1 - first);
  }
  seed[1] = static_cast<int64_t>(impl(d.generator).take());
  note_drawn(host, d, false);
}

std::pair<uint64_t, uint64_t> random_state(c10::DeviceIndex device) {
  const std::lock_guard<std::mutex> lock(devices_mutex());
  auto& d = device_state(device);
  Host host;
  follow(host);
  return {d.generator.current_seed(), impl(d.generator).get_offset()};
}

void set_random_state(c10::DeviceIndex device, uint64_t seed, uint64_t offset) {
  const std::lock_guard<std::mutex> lock(devices_mutex());
  auto& d = device_state(device);
  Host host;
  follow(host);  // so that an earlier torch.manual_seed does not come after this
  impl(d.generator).set_current_seed(seed);
  impl(d.generator).set_offset(offset);
  d.has_own_state = seed != last_host_state.seed;
  note_drawn(host, d, true);
}

void begin_captured_draws(c10::DeviceIndex device) {
  const auto [seed, offset] = random_state(device);
  const std::lock_guard<std::mutex> lock(devices_mutex());
  device_state(device).captured = {seed, offset, 0};
}

CapturedDraws captured_draws(c10::DeviceIndex device) {
  const std::lock_guard<std::mutex> lock(devices_mutex());
  return device_state(device).captured.value_or(CapturedDraws());
}

void end_captured_draws(c10::DeviceIndex device) {
  const auto [seed, offset, count] = captured_draws(device);
  {
    const std::lock_guard<std::mutex> lock(devices_mutex());
    device_state(device).captured.reset();
  }
  if (count != 0) {
    set_random_state(device, seed, offset);
  }
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<XlaGeneratorImpl>(std::max<c10::DeviceIndex>(device, 0));
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  const std::lock_guard<std::mutex> lock(devices_mutex());
  return device_state(std::max<c10::DeviceIndex>(device, 0)).generator;
}

}  // namespace torch_xla
