// The few things the recorder asks of the Python side. Each takes the GIL, so none may be called under the recorder's
// lock; a Python exception passes through PyTorch unchanged.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <exception>
#include <functional>
#include <string>
#include <vector>

typedef struct _object PyObject;

namespace torch_xla {

// Brings a CPU tensor to a device, to where `placement` says; returns a new reference to its buffer. One whose memory
// nobody writes to, `immutable`, need not be copied.
PyObject* upload(const at::Tensor& cpu, c10::DeviceIndex device, uint32_t placement, bool immutable);
// A buffer of one number everywhere; `line` is the user's. A new reference.
PyObject* fill(c10::IntArrayRef sizes, at::ScalarType dtype, const c10::IValue& number, c10::DeviceIndex device,
               const std::string* line, uint32_t placement);
// Copies of buffers, each on its own device; new references.
std::vector<PyObject*> copy(const std::vector<PyObject*>& buffers);
// Several buffers of one dtype as one, end to end, and back again; new references.
PyObject* pack(const std::vector<PyObject*>& buffers, bool stacked);
PyObject* member(PyObject* stack, size_t place);
std::vector<PyObject*> unpack(PyObject* buffer, const std::vector<std::vector<int64_t>>& shapes);
// Copies a NumPy array of a graph's numbers to a device; returns a new reference to its buffer.
PyObject* put(PyObject* numbers, c10::DeviceIndex device);
// Raises what a run that failed on a device has to say.
void explain(PyObject* token, c10::DeviceIndex device);
// The values of an xla tensor, computed first where they are pending, as a new CPU tensor.
at::Tensor fetch(const at::Tensor& xla);
// Whether a device has computed all that was recorded; starts what is pending.
bool query(c10::DeviceIndex device);
// Computes all that was recorded on a device, and waits for it.
void synchronize(c10::DeviceIndex device);
// Counts an operator that gives a value to Python.
void note_read(const char* op);
// Computes these tensors now (eager mode).
void evaluate(const std::vector<at::Tensor>& tensors);
// Tells that an operator runs on the host, with the reason.
void note_host_op(const std::string& op, const std::string& reason);
// Looks for a loop in what was recorded on a device, or cuts segments of one that is followed.
void cut_loop(c10::DeviceIndex device);
// Whether an operator is lowered for every device and type, not run by the CPU's kernel.
bool is_lowered(const std::string& op);
// Whether an operator runs on the host between two programs, because those of this device cannot call it.
bool needs_host(const std::string& op);
// Raises where a call is refused, which `ask` may tell: it runs the CPU kernel on tensors of no more bytes, with a Fill
// of record/meta_cache.h. Gives the magnitude up to which numbers do not matter for that.
using AskCpu = std::function<void(size_t bytes, int fill)>;
double check_call(const std::string& op, const std::string& recorded, c10::ArrayRef<c10::IValue> arguments,
                  size_t result_bytes, const AskCpu& ask);

// Whether an exception says that a kernel does not take a call, or cannot tell what it returns. An interrupt, an exit
// and a lack of memory say nothing of the call, and must pass.
bool refuses_call(std::exception& error);

// `hooks` is a Python object with methods of these names; kept for the life of the process.
void set_python_hooks(PyObject* hooks);

// Eager mode is the process's; a thread in a region records all the same.
bool eager();
void set_eager(bool on);
void suspend_eager(bool on);

}  // namespace torch_xla
