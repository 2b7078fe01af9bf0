#include "run/meetings.h"

#include <chrono>
#include <deque>
#include <unordered_map>

namespace torch_xla {

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kUnderWay = 64;
constexpr size_t kRemembered = 4096;

struct Entry {
  Meeting meeting;
  uint64_t start = 0;
  Clock::time_point since;
  py::object token;  // none while it is being started
};

// Never destroyed: the interpreter ends before that.
struct Starts {
  std::deque<Entry> under_way;
  std::unordered_map<int64_t, Started> groups;
  uint64_t starts = 0;
};

Starts& all_starts() {
  static auto* const all = new Starts;
  return *all;
}

enum class State { Running, Done, Failed };

State state_of(const Entry& entry) {
  if (entry.meeting.failed) {
    return State::Failed;
  }
  if (!entry.token) {
    return State::Running;
  }
  try {
    if (!entry.token.attr("is_ready")().cast<bool>()) {
      return State::Running;
    }
    entry.token.attr("block_until_ready")();  // does not block any more; raises what it failed with
    return State::Done;
  } catch (py::error_already_set&) {
    return State::Failed;
  }
}

// Takes out what has come to its end, and gives what failed.
std::vector<Meeting> settle() {
  auto& entries = all_starts().under_way;
  std::vector<Meeting> failures;
  for (auto entry = entries.begin(); entry != entries.end();) {
    const auto state = state_of(*entry);
    if (state == State::Running) {
      ++entry;
      continue;
    }
    if (state == State::Failed) {
      failures.push_back(entry->meeting);
      failures.back().failed = true;
    }
    entry = entries.erase(entry);
  }
  return failures;
}

}  // namespace

uint64_t meet(int64_t group, int64_t meaning) {
  auto& all = all_starts();
  if (all.under_way.size() >= kUnderWay) {
    all.under_way.pop_front();  // long past, as so many were started since
  }
  auto& started = all.groups[group];
  started.count++;
  const auto before = started.chain.empty() ? 0 : static_cast<uint64_t>(started.chain.back());
  // The step of a linear congruential generator: each start has its place in the order.
  started.chain.push_back(static_cast<int64_t>(before * 6364136223846793005U + static_cast<uint64_t>(meaning)));
  started.meanings.push_back(meaning);
  if (started.meanings.size() > 2 * kRemembered) {
    started.chain.erase(started.chain.begin(), started.chain.end() - kRemembered);
    started.meanings.erase(started.meanings.begin(), started.meanings.end() - kRemembered);
  }
  all.under_way.push_back({{group, meaning, started.count}, ++all.starts, Clock::now(), {}});
  return all.starts;
}

void met(uint64_t start, py::object token) {
  for (auto& entry : all_starts().under_way) {
    if (entry.start == start) {
      entry.meeting.failed = !token;
      entry.token = std::move(token);
    }
  }
}

std::vector<Meeting> meetings() {
  const auto failures = settle();
  std::vector<Meeting> found;
  for (const auto& entry : all_starts().under_way) {
    found.push_back(entry.meeting);
    found.back().seconds = std::chrono::duration<double>(Clock::now() - entry.since).count();
  }
  found.insert(found.end(), failures.begin(), failures.end());
  return found;
}

Started started(int64_t group) { return all_starts().groups[group]; }

}  // namespace torch_xla
