// A traced graph as calls that are made one after the other, without Python between them: the way from Python to an
// operator takes longer than recording it. They go through PyTorch's dispatcher, as those from Python do.
#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/python_arg_parser.h>

#include "base/user_line.h"
#include "bindings/bindings.h"
#include "bindings/describe.h"

namespace torch_xla {

namespace {

using c10::IValue;

// Stands for a value of the graph among the arguments of a call.
struct Slot {
  uint32_t number;
};

class Calls {
 public:
  explicit Calls(uint32_t inputs) : inputs_(inputs), slots_(inputs) {}

  // Adds a call of an operator; gives the number of its first result, which the others follow.
  uint32_t add(const std::string& name, const std::string& overload, const py::tuple& args, const py::dict& kwargs) {
    Call call;
    call.op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    const auto& schema = call.op->schema();
    const auto symbol = c10::Symbol::fromQualString(name);
    const torch::jit::ToIValueAllowNumbersAsTensors numbers(
        symbol.is_prims() || (symbol.is_aten() && torch::should_allow_numbers_as_tensors(symbol.toUnqualString())));
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto& argument = schema.arguments()[i];
      const auto& type = argument.real_type();
      if (i < args.size()) {
        call.operands.push_back(operand_of(args[i], type, argument.N()));
      } else if (kwargs.contains(argument.name().c_str())) {
        call.operands.push_back(operand_of(kwargs[argument.name().c_str()], type, argument.N()));
      } else {
        TORCH_CHECK(argument.default_value(), name, "() is missing value for argument '", argument.name(), "'");
        call.operands.push_back({.constant = *argument.default_value()});
      }
    }
    return add(std::move(call), schema.returns().size());
  }

  // Adds what a function of numbers gives: sizes of an open shape are computed by Python's operators.
  uint32_t add_number(py::function function, const py::tuple& args) {
    Call call;
    call.function = std::move(function);
    for (const auto& x : args) {
      call.operands.push_back(operand_of(x, c10::NumberType::get()));
    }
    return add(std::move(call), 1);
  }

  // Adds an element of a list.
  uint32_t add_element(const Slot& list, uint32_t position) {
    Call call;
    call.position = position;
    call.operands.push_back({.kind = Operand::Kind::Value, .slot = checked(list)});
    return add(std::move(call), 1);
  }

  // Ends the graph: `outputs` are what it returns, with None for what is no value of its own.
  void finish(const std::vector<std::optional<Slot>>& outputs) {
    used_.resize(slots_);
    for (const auto& output : outputs) {
      outputs_.push_back(output ? std::optional(checked(*output)) : std::nullopt);
      if (output) {
        used_[output->number] = true;
      }
    }
    const std::function<void(Operand&)> mark = [&](Operand& x) {
      if (x.kind == Operand::Kind::Value) {
        x.last = !used_[x.slot];
        used_[x.slot] = true;
      }
      std::for_each(x.parts.rbegin(), x.parts.rend(), mark);
    };
    for (auto call = calls_.rbegin(); call != calls_.rend(); ++call) {
      std::for_each(call->operands.rbegin(), call->operands.rend(), mark);
    }
  }

  // What the graph returns; or None, with nothing done, where an input is neither a tensor nor a number.
  py::object run(const py::tuple& inputs) const {
    TORCH_CHECK(inputs.size() == inputs_, "[calls] got ", inputs.size(), " inputs, expected ", inputs_);
    std::vector<IValue> values(slots_);
    for (uint32_t i = 0; i < inputs_; ++i) {
      auto* const x = PyTuple_GET_ITEM(inputs.ptr(), i);
      if (THPVariable_Check(x)) {
        values[i] = THPVariable_Unpack(x);
      } else if (const auto number = number_of(x)) {
        values[i] = *number;
      } else if (x != Py_None) {
        return py::none();
      }
    }
    {
      const LineScope line;
      const py::gil_scoped_release no_gil;
      // They were traced below autograd, and need it only where somebody differentiates them again.
      const bool differentiated =
          c10::GradMode::is_enabled() || torch::autograd::ForwardADLevel::try_get_by_idx(0) ||
          c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
      const c10::impl::ExcludeDispatchKeyGuard below(differentiated ? c10::DispatchKeySet()
                                                                    : c10::autograd_dispatch_keyset);
      torch::jit::Stack stack;
      for (const auto& call : calls_) {
        make(call, values, stack);
      }
    }
    py::list results;
    for (const auto& output : outputs_) {
      results.append(output ? to_python(values[*output]) : py::object(py::none()));
    }
    return results;
  }

 private:
  struct Operand {
    enum class Kind : uint8_t { Constant, Value, List } kind = Kind::Constant;
    bool last = false;  // no later call wants it
    uint32_t slot = 0;
    IValue constant;
    c10::TypePtr type;  // of the value, or of the list's elements
    std::vector<Operand> parts;
  };
  // Of an operator, of a function, or for want of both an element of a list.
  struct Call {
    std::optional<c10::OperatorHandle> op;
    py::object function;
    uint32_t position = 0;
    std::vector<Operand> operands;
    uint32_t first = 0;  // of its results
  };

  uint32_t checked(const Slot& slot) const {
    TORCH_CHECK(slot.number < slots_, "[calls] got value ", slot.number, ", expected one of the first ", slots_);
    return slot.number;
  }

  uint32_t add(Call call, size_t results) {
    call.first = slots_;
    slots_ += results;
    calls_.push_back(std::move(call));
    return calls_.back().first;
  }

  Operand operand_of(const py::handle& x, const c10::TypePtr& declared, std::optional<int32_t> length = {}) const {
    const auto optional = declared->cast<c10::OptionalType>();
    const auto type = optional ? optional->getElementType() : declared;
    if (py::isinstance<Slot>(x)) {
      return {.kind = Operand::Kind::Value, .slot = checked(py::cast<Slot>(x)), .type = type};
    }
    const auto list = type->cast<c10::ListType>();
    if (list && (PyList_Check(x.ptr()) || PyTuple_Check(x.ptr()))) {
      const auto elements = list->getElementType();
      const bool sizes = elements->kind() == c10::TypeKind::SymIntType;  // numbers by the time of a call
      Operand operands{.kind = Operand::Kind::List, .type = sizes ? c10::IntType::get() : elements};
      bool constant = true;
      for (const auto& part : py::reinterpret_borrow<py::sequence>(x)) {
        operands.parts.push_back(operand_of(part, elements));
        constant = constant && operands.parts.back().kind == Operand::Kind::Constant;
      }
      if (!constant) {
        return operands;
      }
    }
    return {.constant = torch::jit::toIValue(x, declared, length)};
  }

  static std::optional<IValue> number_of(PyObject* x) {
    if (PyBool_Check(x)) {
      return IValue(x == Py_True);
    }
    if (PyLong_CheckExact(x)) {
      return IValue(py::cast<int64_t>(py::handle(x)));
    }
    return PyFloat_CheckExact(x) ? std::optional(IValue(PyFloat_AS_DOUBLE(x))) : std::nullopt;
  }

  // A number where the schema wants another kind of it, as it would be converted on its way from Python.
  static IValue converted(IValue value, const c10::TypePtr& type) {
    if (!value.isScalar() || type == nullptr) {
      return value;
    }
    switch (type->kind()) {
      case c10::TypeKind::TensorType:
        return at::native::wrapped_scalar_tensor(value.toScalar());
      case c10::TypeKind::FloatType:
        return value.toScalar().toDouble();
      case c10::TypeKind::IntType:
      case c10::TypeKind::SymIntType:
        return value.isBool() ? IValue(static_cast<int64_t>(value.toBool())) : value;
      default:
        return value;
    }
  }

  static IValue value_of(const Operand& x, std::vector<IValue>& values) {
    switch (x.kind) {
      case Operand::Kind::Constant:
        return x.constant;
      case Operand::Kind::Value:
        return converted(x.last ? std::move(values[x.slot]) : values[x.slot], x.type);
      case Operand::Kind::List:
        break;
    }
    c10::impl::GenericList list(x.type);
    list.reserve(x.parts.size());
    for (const auto& part : x.parts) {
      list.push_back(value_of(part, values));
    }
    return list;
  }

  static IValue computed(const Call& call, const torch::jit::Stack& arguments) {
    const py::gil_scoped_acquire gil;
    py::tuple numbers(arguments.size());
    for (size_t i = 0; i < arguments.size(); ++i) {
      numbers[i] = to_python(arguments[i]);
    }
    const auto result = call.function(*numbers);
    const auto number = number_of(result.ptr());
    TORCH_CHECK_TYPE(number, "[calls] got ", py::repr(result).cast<std::string>(), " of ",
                     py::repr(call.function).cast<std::string>(), ", expected a number");
    return *number;
  }

  void make(const Call& call, std::vector<IValue>& values, torch::jit::Stack& stack) const {
    stack.clear();
    for (const auto& operand : call.operands) {
      stack.push_back(value_of(operand, values));
    }
    if (call.op) {
      call.op->callBoxed(stack);
      for (size_t i = 0; i < stack.size(); ++i) {
        values[call.first + i] = used_[call.first + i] ? std::move(stack[i]) : IValue();
      }
    } else {
      values[call.first] = call.function ? computed(call, stack) : IValue(stack[0].toListRef().at(call.position));
    }
  }

  const uint32_t inputs_;
  uint32_t slots_;
  std::vector<bool> used_;  // by a call or as a result
  std::vector<Call> calls_;
  std::vector<std::optional<uint32_t>> outputs_;
};

}  // namespace

void bind_calls(py::module_& m) {
  py::class_<Slot>(m, "Slot").def(py::init<uint32_t>(), py::arg("number"));
  py::class_<Calls>(m, "Calls")
      .def(py::init<uint32_t>(), py::arg("inputs"))
      .def("add",
           py::overload_cast<const std::string&, const std::string&, const py::tuple&, const py::dict&>(&Calls::add))
      .def("add_number", &Calls::add_number)
      .def("add_element", &Calls::add_element)
      .def("finish", &Calls::finish)
      .def("run", torch::wrap_pybind_function([](const Calls& c, const py::tuple& inputs) { return c.run(inputs); }));
}

}  // namespace torch_xla
