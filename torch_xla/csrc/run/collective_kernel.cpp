#include "run/collective_kernel.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>

#if __has_include(<xla/ffi/api/ffi.h>)
#include "run/ffi_values.h"
#endif

namespace torch_xla {

namespace {

using c10d::ReduceOp;
using RankNumbers = std::vector<int64_t>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using Clock = std::chrono::steady_clock;

// As `_AHEAD` in ops/collective.py.
constexpr int64_t kAhead = 15;

struct Group {
  BackendPtr backend;
  uint64_t count = 0;                          // collectives so far
  std::vector<std::deque<int64_t>> announced;  // per member, what it runs next
};

struct Wait {
  std::vector<int64_t> ranks;
  std::string what;
  uint64_t count = 0;
  Clock::time_point since;
};

// Never destroyed: XLA's threads may be in a collective when the process ends.
struct Job {
  std::mutex mutex;
  int64_t rank = 0;
  std::map<std::vector<int64_t>, Group> groups;
  std::optional<Wait> wait;
  std::optional<CollectiveFailure> failure;  // the latest that nobody has taken
  std::string stopped;
};
Job& job() {
  static auto* const j = new Job;
  return *j;
}

std::string listed(const std::vector<int64_t>& ranks) {
  std::string text;
  for (const auto rank : ranks) {
    text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  return text;
}

// The process groups do not stop what was started. So it works on memory that it keeps, and who waits can leave.
void wait_for(const c10::intrusive_ptr<c10d::Work>& work) {
  constexpr std::chrono::milliseconds kTurn(100);
  while (true) {
    try {
      work->wait(kTurn);
      return;
    } catch (const std::exception&) {
      if (work->isCompleted()) {  // maybe since the wait gave up: it says itself whether it failed
        work->wait();
        return;
      }
      const std::lock_guard lock(job().mutex);
      TORCH_CHECK(job().stopped.empty(), job().stopped);
    }
  }
}

// The collective that this thread is in, and what is known of its failure.
thread_local CollectiveFailure current;

// One collective of this process's group.
class CollectiveCall {
 public:
  CollectiveCall(std::vector<int64_t> ranks, std::string what) : ranks_(std::move(ranks)) {
    auto& j = job();
    const std::lock_guard lock(j.mutex);
    TORCH_CHECK(j.stopped.empty(), j.stopped);
    rank_ = j.rank;
    size_ = static_cast<int64_t>(ranks_.size());
    current = {what + " of ranks " + listed(ranks_), {}};
    if (size_ > 1) {
      const auto it = j.groups.find(ranks_);
      TORCH_CHECK(it != j.groups.end(), "[collective] rank ", rank_, " has no group of ranks ", listed(ranks_));
      group_ = &it->second;
      backend_ = group_->backend;
      j.wait = Wait{ranks_, std::move(what), ++group_->count, Clock::now()};
    }
  }
  ~CollectiveCall() {
    const std::lock_guard lock(job().mutex);
    job().wait.reset();
  }
  CollectiveCall(const CollectiveCall&) = delete;
  CollectiveCall& operator=(const CollectiveCall&) = delete;

  int64_t size() const { return size_; }

  // Compares what this process is about to do with what the others of the group are. All know whose announcements are
  // used up, so they exchange new ones at the same place.
  void compare(const RankNumbers& ahead) {
    if (backend_ == nullptr || ahead.size() == 0) {
      return;
    }
    auto& announced = group_->announced;
    announced.resize(size_);
    if (std::any_of(announced.begin(), announced.end(), [](const auto& queue) { return queue.empty(); })) {
      auto announcement = at::zeros({kAhead + 1}, at::kLong);
      auto* const numbers = announcement.mutable_data_ptr<int64_t>();
      numbers[0] = std::min<int64_t>(static_cast<int64_t>(ahead.size()), kAhead);
      std::copy_n(ahead.begin(), numbers[0], numbers + 1);
      auto all = at::empty({size_ * (kAhead + 1)}, at::kLong);
      wait_for(backend_->_allgather_base(all, announcement));
      const auto* theirs = all.const_data_ptr<int64_t>();
      for (auto& queue : announced) {
        queue.assign(theirs + 1, theirs + 1 + theirs[0]);
        theirs += kAhead + 1;
      }
    }
    for (int64_t i = 0; i < size_; ++i) {
      const auto next = announced[i].front();
      if (next != ahead[0]) {
        current.differing = {ahead[0], ranks_[i], next};
        TORCH_CHECK(false, "[collective] ranks ", rank_, " and ", ranks_[i], " are about to run different collectives");
      }
    }
    for (auto& queue : announced) {
      queue.pop_front();
    }
  }

  void all_reduce(const std::vector<at::Tensor>& in, const std::vector<at::Tensor>& out, ReduceOp::RedOpType op) {
    auto flat = flattened(in);
    const auto wide = widened(flat.scalar_type());
    auto sum = wide == flat.scalar_type() ? flat : flat.to(wide);
    if (backend_ != nullptr) {
      std::vector<at::Tensor> tensors{sum};
      c10d::AllreduceOptions options;
      options.reduceOp = op;
      wait_for(backend_->allreduce(tensors, options));
    }
    unflatten(sum, out);
  }

  void broadcast(const std::vector<at::Tensor>& in, const std::vector<at::Tensor>& out, int64_t root) {
    auto flat = flattened(in);
    if (backend_ != nullptr) {
      std::vector<at::Tensor> tensors{bytes(flat)};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      wait_for(backend_->broadcast(tensors, options));
    }
    unflatten(flat, out);
  }

  void all_gather(const at::Tensor& in, const at::Tensor& out) {
    if (backend_ == nullptr) {
      unflatten(in.reshape({-1}), {out});
      return;
    }
    auto part = copied(in);
    auto all = at::empty_like(out);
    auto from = bytes(part), to = bytes(all);
    wait_for(backend_->_allgather_base(to, from));
    unflatten(all.reshape({-1}), {out});
  }

  void all_to_all(const at::Tensor& in, const at::Tensor& out) { unflatten(exchanged(in).reshape({-1}), {out}); }

  at::Tensor exchanged(const at::Tensor& in) {
    auto part = copied(in);
    if (backend_ == nullptr) {
      return part;
    }
    auto all = at::empty_like(part);
    auto from = bytes(part).view({size_, -1}), to = bytes(all).view({size_, -1});
    std::vector<int64_t> even;
    wait_for(backend_->alltoall_base(to, from, even, even));
    return all;
  }

  void reduce_scatter(const at::Tensor& in, const at::Tensor& out, ReduceOp::RedOpType op) {
    const auto parts = exchanged(in);
    auto reduced = parts[0].to(
        parts.scalar_type() == at::kHalf || parts.scalar_type() == at::kBFloat16 ? at::kFloat : parts.scalar_type(),
        /*non_blocking=*/false, /*copy=*/true);
    for (int64_t i = 1; i < parts.size(0); ++i) {
      combine(reduced, parts[i], op);
    }
    unflatten(reduced.reshape({-1}), {out});
  }

  // Sends to the process after each source in the list, if this is the source. As an exchange of parts, most of which
  // are empty: the process groups close a connection over which a single message does not come in time.
  void permute(const at::Tensor& in, const at::Tensor& out, const RankNumbers& sources, const RankNumbers& targets) {
    auto from = bytes(copied(in));
    const auto length = from.numel();
    std::vector<int64_t> sent_lengths(size_), received_lengths(size_);
    for (size_t i = 0; i < sources.size(); ++i) {
      if (sources[i] == rank_) {
        sent_lengths[rank_index(targets[i])] = length;
      }
      if (targets[i] == rank_) {
        received_lengths[rank_index(sources[i])] = length;
      }
    }
    const auto any = [length](const auto& lengths) {
      return std::find(lengths.begin(), lengths.end(), length) != lengths.end();
    };
    const bool sends = any(sent_lengths), receives = any(received_lengths);
    auto to = receives ? at::empty_like(from) : from.new_empty({0});
    if (backend_ == nullptr) {
      to.copy_(receives ? from : to);
    } else {
      from = sends ? from : from.new_empty({0});
      wait_for(backend_->alltoall_base(to, from, received_lengths, sent_lengths));
    }
    out.zero_();
    if (receives) {
      bytes(out).copy_(to);
    }
  }

 private:
  static at::Tensor bytes(const at::Tensor& t) { return t.reshape({-1}).view(at::kByte); }

  // The types that PyTorch's groups reduce.
  static at::ScalarType widened(at::ScalarType type) {
    switch (type) {
      case at::kShort:
      case at::kUInt16:
        return at::kInt;
      case at::kUInt32:
      case at::kUInt64:
        return at::kLong;
      default:
        return type;
    }
  }

  // Of one dtype. PyTorch's own copies of large tensors would wait for its threads, which spin while the other
  // processes of this host have the cores.
  static at::Tensor flattened(const std::vector<at::Tensor>& tensors) {
    int64_t count = 0;
    for (const auto& t : tensors) {
      count += t.numel();
    }
    auto flat = at::empty({count}, tensors.at(0).options());
    auto* next = static_cast<char*>(flat.mutable_data_ptr());
    for (const auto& t : tensors) {
      next = std::copy_n(static_cast<const char*>(t.const_data_ptr()), t.nbytes(), next);
    }
    return flat;
  }

  static void unflatten(const at::Tensor& flat, const std::vector<at::Tensor>& tensors) {
    const auto values = flat.to(tensors.at(0).scalar_type());
    const auto* next = static_cast<const char*>(values.const_data_ptr());
    for (const auto& t : tensors) {
      std::copy_n(next, t.nbytes(), static_cast<char*>(t.mutable_data_ptr()));
      next += t.nbytes();
    }
  }

  static at::Tensor copied(const at::Tensor& t) { return flattened({t}).view(t.sizes()); }

  static void combine(at::Tensor& reduced, const at::Tensor& part, ReduceOp::RedOpType op) {
    switch (op) {
      case ReduceOp::SUM:
        reduced.scalar_type() == at::kBool ? reduced.logical_or_(part) : reduced.add_(part);
        break;
      case ReduceOp::PRODUCT:
        reduced.scalar_type() == at::kBool ? reduced.logical_and_(part) : reduced.mul_(part);
        break;
      case ReduceOp::MIN:
        reduced = at::minimum(reduced, part);
        break;
      case ReduceOp::MAX:
        reduced = at::maximum(reduced, part);
        break;
      case ReduceOp::BAND:
        reduced.bitwise_and_(part);
        break;
      case ReduceOp::BOR:
        reduced.bitwise_or_(part);
        break;
      default:
        reduced.bitwise_xor_(part);
    }
  }

  int rank_index(int64_t rank) const {
    const auto it = std::find(ranks_.begin(), ranks_.end(), rank);
    TORCH_CHECK(it != ranks_.end(), "[collective] got rank ", rank, ", expected one of ", listed(ranks_));
    return static_cast<int>(it - ranks_.begin());
  }

  std::vector<int64_t> ranks_;
  int64_t rank_ = 0;
  int64_t size_ = 1;
  Group* group_ = nullptr;  // one collective of a group is under way at a time
  BackendPtr backend_;
};

// The group of this process: `groups` has the ranks of all, one after the other.
RankNumbers own_group(const RankNumbers& groups, const RankNumbers& sizes) {
  int64_t rank = 0;
  {
    const std::lock_guard lock(job().mutex);
    rank = job().rank;
  }
  auto next = groups.begin();
  for (const auto size : sizes) {
    std::vector<int64_t> ranks(next, next + size);
    if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) {
      return ranks;
    }
    next += size;
  }
  return {rank};
}

std::string described(const std::string& kind, const std::vector<at::Tensor>& in) {
  std::string text = kind + " of ";
  for (size_t i = 0; i < in.size() && i < 3; ++i) {
    text += (i > 0 ? ", " : "") + c10::str(in[i].scalar_type(), in[i].sizes());
  }
  return in.size() > 3 ? text + " and " + std::to_string(in.size() - 3) + " more" : text;
}

[[noreturn]] void fail(const std::string& text) {
  const std::lock_guard lock(job().mutex);
  job().failure = current;
  TORCH_CHECK(false, "[collective] ", text.substr(0, text.find('\n')));
}

void start(const Collective& collective, const std::vector<at::Tensor>& in, const std::vector<at::Tensor>& out) {
  const auto& kind = collective.kind;
  CollectiveCall call(own_group(collective.groups, collective.sizes), described(kind, in));
  call.compare(collective.ahead);
  const auto reduction = static_cast<ReduceOp::RedOpType>(collective.reduction);
  if (kind == "all_reduce") {
    call.all_reduce(in, out, reduction);
  } else if (kind == "broadcast") {
    call.broadcast(in, out, collective.root);
  } else if (kind == "all_gather") {
    call.all_gather(in.at(0), out.at(0));
  } else if (kind == "reduce_scatter") {
    call.reduce_scatter(in.at(0), out.at(0), reduction);
  } else if (kind == "all_to_all") {
    call.all_to_all(in.at(0), out.at(0));
  } else if (kind == "permute") {
    call.permute(in.at(0), out.at(0), collective.sources, collective.targets);
  } else {
    TORCH_CHECK(false, "[collective] got kind ", kind);
  }
}

}  // namespace

void run_collective(const Collective& collective, const std::vector<at::Tensor>& in,
                    const std::vector<at::Tensor>& out) {
  try {
    const c10::InferenceMode guard;
    start(collective, in, out);
  } catch (const c10::Error& error) {
    fail(error.what_without_backtrace());
  } catch (const std::exception& error) {
    fail(error.what());
  } catch (...) {
    fail("something was thrown that is no std::exception");
  }
}

HostResults run_collectives(const CollectiveParts& parts, const std::vector<at::Tensor>& inputs,
                            const std::vector<Meta>& metas) {
  HostResults results;
  for (const auto& meta : metas) {
    results.push_back(at::zeros(meta.sizes, meta.dtype));
  }
  for (const auto& [places, collective] : parts) {
    std::vector<at::Tensor> in, out;
    for (const auto place : places) {
      in.push_back(inputs[place].contiguous());
      out.push_back(results[place]);
    }
    run_collective(collective, in, out);
  }
  return results;
}

#if __has_include(<xla/ffi/api/ffi.h>)

namespace {

namespace ffi = xla::ffi;

ffi::Error call_collective(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes) {
  try {  // XLA calls this through C, which nothing may be thrown through
    std::vector<at::Tensor> in, out;
    for (size_t i = 0; i + 1 < operands.size(); ++i) {  // the last of each says what comes before
      in.push_back(tensor_at(operands.get<ffi::AnyBuffer>(i).value()));
      out.push_back(tensor_at(*results.get<ffi::AnyBuffer>(i).value()));
    }
    const auto numbers = [&](std::string_view name) {
      const auto span = ffi_attribute<FfiNumbers>(attributes, name);
      return RankNumbers(span.begin(), span.end());
    };
    const auto number = [&](std::string_view name) { return ffi_attribute<int64_t>(attributes, name); };
    run_collective({ffi_text(attributes, "kind"), numbers("groups"), numbers("sizes"), numbers("ahead"),
                    number("reduction"), number("root"), numbers("sources"), numbers("targets")},
                   in, out);
    return ffi::Error::Success();
  } catch (const c10::Error& error) {
    return ffi::Error::Internal(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
}

XLA_FFI_DEFINE_HANDLER(kCollective, call_collective, ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());

}  // namespace

py::object collective_kernel_target() {
  return py::capsule(reinterpret_cast<void*>(kCollective), "xla._CUSTOM_CALL_TARGET");
}

#else

py::object collective_kernel_target() { return py::none(); }

#endif

void set_collective_rank(int64_t rank) {
  const std::lock_guard lock(job().mutex);
  job().rank = rank;
}

void add_collective_group(const std::vector<int64_t>& ranks, const py::object& backend) {
  auto group = backend.cast<BackendPtr>();
  const std::lock_guard lock(job().mutex);
  job().groups[ranks].backend = std::move(group);
}

CollectiveWait collective_wait() {
  const std::lock_guard lock(job().mutex);
  const auto& wait = job().wait;
  if (!wait) {
    return {};
  }
  return {wait->ranks, wait->what, wait->count, std::chrono::duration<double>(Clock::now() - wait->since).count()};
}

std::optional<CollectiveFailure> take_collective_failure() {
  const std::lock_guard lock(job().mutex);
  return std::exchange(job().failure, std::nullopt);
}

void stop_collectives(const std::string& reason) {
  const std::lock_guard lock(job().mutex);
  job().stopped = reason;
}

}  // namespace torch_xla
