#include "run/in_flight.h"

#include <array>
#include <chrono>
#include <utility>

#include "base/metric.h"
#include "base/python_hooks.h"
#include "tensor/storage.h"

namespace torch_xla {

InFlight& InFlight::of(c10::DeviceIndex device) {
  static auto* const all = new std::array<InFlight*, kMaxDevices>{};
  auto*& in_flight = all->at(device);
  if (in_flight == nullptr) {
    in_flight = new InFlight(device);
  }
  return *in_flight;
}

py::object InFlight::operator_run() {
  if (operator_run_ && operator_run_.cast<OpByOpRun&>().done()) {
    const auto ended = std::exchange(operator_run_, {});  // not before the slot is empty: it may run Python code
  }
  return operator_run_ ? operator_run_ : py::none();
}

void InFlight::set_operator_run(py::object run) {
  if (!run.is_none()) {
    run.cast<OpByOpRun&>().check();
  }
  const auto before = std::exchange(operator_run_, run.is_none() ? py::object() : std::move(run));
}

void InFlight::wait_for_programs(size_t left) {
  if (tokens_.size() <= left) {
    return;
  }
  const auto start = std::chrono::steady_clock::now();
  while (tokens_.size() > left) {
    auto token = std::move(tokens_.front());
    tokens_.pop_front();
    try {
      block_until_ready(token);
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) {  // an interrupt: the run goes on, and may still fail
        tokens_.push_front(std::move(token));
        throw;
      }
      explain(token.ptr(), device_);
      throw;
    }
  }
  note_wait(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
}

std::vector<py::object> InFlight::take_programs() {
  std::vector<py::object> tokens(tokens_.begin(), tokens_.end());
  tokens_.clear();
  return tokens;
}

bool InFlight::idle() {
  const auto run = operator_run();
  if (!run.is_none() && run.cast<OpByOpRun&>().busy()) {
    return false;
  }
  const auto token = tokens_.empty() ? py::object() : tokens_.back();  // a device runs one after another
  return !token || token.attr("is_ready")().cast<bool>();
}

void block_until_ready(const py::object& token) {
  static auto* const name = PyUnicode_InternFromString("block_until_ready");
  if (!py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(token.ptr(), name))) {
    throw py::error_already_set();
  }
}

void note_wait(double seconds) {
  static auto &waiting = metric("DeviceLockWait"), &executing = metric("ExecuteTime");
  waiting.add(seconds, "seconds");
  executing.amend(seconds);  // what was started took longer than its start
}

}  // namespace torch_xla
