// Random state: one (seed, offset) pair per device; every operator that draws takes the next offset as an input of the
// program, so that numbers differ from step to step without another compile, and a recomputed node draws the same ones.
#pragma once
#include <ATen/core/Generator.h>

#include <cstdint>
#include <optional>
#include <utility>

namespace torch_xla {

// What an operator draws from: one wrapping number of 64 bits, so that (seed, offset) can be saved as one.
constexpr uint64_t random_key(int64_t seed, int64_t offset) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ULL;  // as GOLDEN of ops/registry.py
  return static_cast<uint64_t>(seed) + static_cast<uint64_t>(offset) * kGolden;
}

// Fills `seed` with the next (seed, offset) of a generator, or of the device's default where none is given.
void next_seed(c10::DeviceIndex device, const std::optional<at::Generator>& generator, int64_t seed[2]);

std::pair<uint64_t, uint64_t> random_state(c10::DeviceIndex device);
void set_random_state(c10::DeviceIndex device, uint64_t seed, uint64_t offset);

// From here on what the device draws is a graph's that is captured. All is of the default generator, and goes on from
// its state: each replay draws the next numbers. The end puts the state back.
void begin_captured_draws(c10::DeviceIndex device);
void end_captured_draws(c10::DeviceIndex device);
// The state at the beginning, and how many numbers were drawn since.
struct CapturedDraws {
  uint64_t seed = 0;
  uint64_t offset = 0;
  uint64_t count = 0;
};
CapturedDraws captured_draws(c10::DeviceIndex device);

at::Generator new_generator(c10::DeviceIndex device);
const at::Generator& default_generator(c10::DeviceIndex device);

}  // namespace torch_xla
