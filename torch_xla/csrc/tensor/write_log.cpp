#include "tensor/write_log.h"

#include <algorithm>
#include <array>

namespace torch_xla {

namespace {

// More are of no use: what is so far behind is never cut.
constexpr size_t kMost = size_t{1} << 20;

Vector<Write>& log_of(c10::DeviceIndex device) {
  static auto* const logs = new std::array<Vector<Write>, kMaxDevices>;
  return (*logs)[device];
}

}  // namespace

void note_write(const Storage& storage) {
  auto& log = log_of(storage.index);
  if (log.size() == kMost) {
    log.erase(log.begin(), log.begin() + kMost / 2);
  }
  log.push_back({storage.id, node_sequence(), {storage.value.node->sequence, storage.value.index}});
}

const Vector<Write>& writes(c10::DeviceIndex device) { return log_of(device); }

void forget_writes(c10::DeviceIndex device, uint64_t until) {
  auto& log = log_of(device);
  log.erase(log.begin(), std::partition_point(log.begin(), log.end(), [&](const Write& w) { return w.when <= until; }));
}

}  // namespace torch_xla
