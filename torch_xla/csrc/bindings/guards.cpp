#include "bindings/guards.h"

#include <torch/csrc/autograd/python_variable.h>

#include <cstring>
#include <typeinfo>

#include "bindings/bindings.h"
#include "bindings/describe.h"
#include "tensor/tensor_impl.h"

namespace torch_xla {

namespace {

py::object checked(PyObject* x) {
  if (x == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(x);
}

std::string text_of(PyObject* x) {
  auto text = checked(PyObject_Repr(x)).cast<std::string>();
  return text.size() > 60 ? text.substr(0, 57) + "..." : text;
}

bool plain(PyObject* x) {
  return x == Py_None || PyLong_CheckExact(x) || PyFloat_CheckExact(x) || PyUnicode_CheckExact(x) || PyBool_Check(x);
}

// A method that Python calls by itself.
bool special(PyObject* name) {
  const auto text = py::handle(name).cast<std::string_view>();
  return text.size() > 4 && text.substr(0, 2) == "__" && text.substr(text.size() - 2) == "__";
}

bool equal(PyObject* a, PyObject* b) {
  if (a == b) {
    return true;
  }
  if (Py_TYPE(a) != Py_TYPE(b)) {
    return false;
  }
  if (PyFloat_Check(a)) {
    const double x = PyFloat_AS_DOUBLE(a);
    const double y = PyFloat_AS_DOUBLE(b);
    return std::memcmp(&x, &y, sizeof(x)) == 0;
  }
  const int same = PyObject_RichCompareBool(a, b, Py_EQ);
  if (same < 0) {
    PyErr_Clear();
  }
  return same > 0;
}

}  // namespace

Guards::Guards(const py::object& policy, const py::list& roots) : policy_(policy), roots_(roots) {
  names_ = py::set(policy.attr("names")());
  size_t known = 0;
  noting_ = true;
  do {  // names bring code, which brings names
    known = names_.size();
    all_ = names_.contains("*");
    facts_.clear();
    storages.clear();
    opaque.clear();
    begin();
  } while (names_.size() != known);
  noting_ = false;
}

py::object Guards::check(const std::unordered_set<uint64_t>& made) {
  made_ = &made;
  next_ = 0;
  const bool same = begin() && (next_ == facts_.size() || differs("is gone"));
  made_ = nullptr;
  return same ? py::object(py::none()) : py::make_tuple(where_, how_);
}

bool Guards::begin() {
  found_.clear();
  steps_.clear();
  for (const auto& root : roots_) {
    const auto pair = py::reinterpret_borrow<py::tuple>(root);
    if (!visit_at(Step::By::Variable, pair[0].ptr(), pair[1].ptr())) {
      return false;
    }
  }
  return true;
}

bool Guards::visit_at(Step::By by, PyObject* name, PyObject* x, Py_ssize_t index) {
  if (plain(x)) {
    if (noting_ || (next_ < facts_.size() && facts_[next_].object.ptr() == x)) {
      return object(x);
    }
  }
  steps_.push_back({by, name, index});
  const bool same = visit(x);
  steps_.pop_back();
  return same;
}

bool Guards::visit(PyObject* x) {
  if (plain(x)) {
    return object(x);
  }
  auto* const type = Py_TYPE(x);
  if ((type == &PyDict_Type && PyDict_GET_SIZE(x) == 0) || (type == &PyTuple_Type && PyTuple_GET_SIZE(x) == 0)) {
    return object(reinterpret_cast<PyObject*>(type)) && word(0);
  }
  const auto* const kind = kind_of(type);
  if (kind == nullptr) {
    return differs("is now a " + std::string(type->tp_name));
  }
  if (kind->what == What::Value || kind->what == What::Same) {
    return object(x);
  }
  if (kind->what == What::Opaque || steps_.size() > kDeepest || facts_.size() > kMost) {
    return visit_opaque(x);
  }
  if ((kind->what == What::Module || kind->what == What::Class) && trusts(x)) {
    return object(x);
  }
  bool same = true;
  return enter(x, same) ? same && visit_kind(x, *kind) : same;
}

bool Guards::visit_kind(PyObject* x, const Kind& kind) {
  switch (kind.what) {
    case What::Tensor:
      if (!visit_tensor(x)) {
        return false;
      }
      break;
    case What::Array:
      return visit_bytes(x);
    case What::Function:
      return visit_function(x);
    case What::Cell: {
      auto* const value = PyCell_GET(x);
      return value != nullptr ? visit(value) : word(0);
    }
    case What::Module:
      return object(x) && visit_entries(PyModule_GetDict(x), true);
    case What::Class:
      return visit_class(x);
    default:
      break;
  }
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(x));
  if (!object(type) || (kind.entries == Entries::Named && !visit(type))) {
    return false;
  }
  for (const auto& name : kind.attributes) {
    PyObject* value = PyObject_GetAttr(x, name.ptr());
    if (value == nullptr) {
      PyErr_Clear();
      if (!word(0)) {
        return false;
      }
      continue;
    }
    const auto held = py::reinterpret_steal<py::object>(value);
    if (!(special(name.ptr()) ? visit(value) : visit_at(Step::By::Attribute, name.ptr(), value))) {
      return false;
    }
  }
  if (kind.entries != Entries::None &&
      !visit_entries(checked(PyObject_GenericGetDict(x, nullptr)).ptr(), kind.entries == Entries::Named && !all_)) {
    return false;
  }
  switch (kind.contents) {
    case Contents::Items:
      return visit_items(x);
    case Contents::Pairs:
      return visit_pairs(x);
    case Contents::Referent:
      return visit(checked(PyObject_CallNoArgs(x)).ptr());
    default:
      return true;
  }
}

bool Guards::visit_tensor(PyObject* x) {
  const auto& tensor = THPVariable_Unpack(x);
  auto* const impl = tensor.unsafeGetTensorImpl();
  if (!word((tensor.requires_grad() ? 1 : 0) + (tensor.is_leaf() ? 2 : 0) + (tensor.is_cpu() ? 4 : 0))) {
    return differs("is another tensor");
  }
  if (typeid(*impl) == typeid(XlaTensorImpl)) {
    Hash shape;
    uint64_t storage = 0;
    {
      const RecorderLock lock;
      const auto& alias = static_cast<XlaTensorImpl*>(impl)->alias;
      storage = alias.storage->id;
      shape.mix(alias.meta->layout);
      shape.mix(static_cast<uint64_t>(alias.meta->offset));
      if (alias.path.defined()) {
        shape.mix(hash_path(alias.path));
      }
    }
    if (noting_) {
      storages.push_back(storage);
    } else if (made_->count(storage) != 0 && next_ < facts_.size()) {
      storage = facts_[next_].word;
    }
    if (!word(storage) || !word(shape.hi ^ shape.lo)) {
      return differs("is another tensor");
    }
  } else if (tensor.is_cpu() && tensor.layout() == at::kStrided && typeid(*impl) == typeid(c10::TensorImpl)) {
    if (!visit_bytes(x)) {
      return false;
    }
  } else if (THPVariable_CheckExact(x)) {
    return visit_opaque(x);
  }
  if (tensor.requires_grad()) {
    for (const char* name : {"_backward_hooks", "_post_accumulate_grad_hooks"}) {
      const auto hooks = checked(PyObject_GetAttrString(x, name));
      if (!visit_at(Step::By::Attribute, py::str(name).ptr(), hooks.ptr())) {
        return false;
      }
    }
  }
  return true;
}

// What a small host tensor or array has in it.
bool Guards::visit_bytes(PyObject* x) {
  const auto found = policy_.attr("contents")(py::handle(x));
  if (found.is_none()) {
    return visit_opaque(x);
  }
  if (noting_ || (next_ < facts_.size() && facts_[next_].object && equal(facts_[next_].object.ptr(), found.ptr()))) {
    return object(found.ptr());
  }
  return differs("has other values");
}

bool Guards::visit_function(PyObject* x) {
  auto* const code = PyFunction_GET_CODE(x);
  if (!object(code)) {
    return differs("is other code");
  }
  const auto* const read = code_of(code, PyFunction_GET_GLOBALS(x));
  if (auto* const closure = PyFunction_GET_CLOSURE(x)) {
    const auto variables = checked(PyObject_GetAttrString(code, "co_freevars"));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(closure); ++i) {
      if (!visit_at(Step::By::Variable, PyTuple_GET_ITEM(variables.ptr(), i), PyTuple_GET_ITEM(closure, i))) {
        return false;
      }
    }
  }
  if (read == nullptr) {
    return true;
  }
  for (auto* const defaults : {PyFunction_GET_DEFAULTS(x), PyFunction_GET_KW_DEFAULTS(x)}) {
    if (!(defaults != nullptr ? visit(defaults) : word(0))) {
      return false;
    }
  }
  const auto look_up = [&](PyObject* in, const py::tuple& wanted) {
    for (const auto& name : wanted) {
      auto* const value = PyDict_GetItemWithError(in, name.ptr());
      if (!(value != nullptr ? visit_at(Step::By::Variable, name.ptr(), value) : word(0))) {
        return false;
      }
    }
    return true;
  };
  return look_up(PyFunction_GET_GLOBALS(x), read->globals) && look_up(PyImport_GetModuleDict(), read->modules) &&
         visit_entries(checked(PyObject_GetAttrString(x, "__dict__")).ptr(), true);
}

bool Guards::visit_class(PyObject* x) {
  auto* const type = reinterpret_cast<PyTypeObject*>(x);
  if (!object(x)) {
    return false;
  }
  auto* const bases = type->tp_bases;
  for (Py_ssize_t i = 0; bases != nullptr && i < PyTuple_GET_SIZE(bases); ++i) {
    if (!visit(PyTuple_GET_ITEM(bases, i))) {
      return false;
    }
  }
  return visit_entries(type->tp_dict, true, true);
}

bool Guards::visit_entries(PyObject* dict, bool named, bool functions) {
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t place = 0;
  uint64_t count = 0;
  while (PyDict_Next(dict, &place, &key, &value)) {
    if (named && !names(key) && !(functions && PyFunction_Check(value) && special(key))) {
      continue;
    }
    ++count;
    if (!object(key) || !visit_at(Step::By::Attribute, key, value)) {
      return false;
    }
  }
  return word(count);
}

bool Guards::visit_items(PyObject* x) {
  const auto items = checked(PySequence_Fast(x, ""));
  const auto count = PySequence_Fast_GET_SIZE(items.ptr());
  if (!word(count)) {
    return differs("has another length");
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!visit_at(Step::By::Index, nullptr, PySequence_Fast_GET_ITEM(items.ptr(), i), i)) {
      return false;
    }
  }
  return true;
}

bool Guards::visit_pairs(PyObject* dict) {
  if (!word(PyDict_GET_SIZE(dict))) {
    return differs("has another length");
  }
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t place = 0;
  while (PyDict_Next(dict, &place, &key, &value)) {
    if (!visit(key) || !visit_at(Step::By::Key, key, value)) {
      return false;
    }
  }
  return true;
}

bool Guards::visit_opaque(PyObject* x) {
  if (!noting_) {
    return differs("cannot be compared");
  }
  opaque.push_back(path() + ", a " + Py_TYPE(x)->tp_name);
  return true;
}

bool Guards::enter(PyObject* x, bool& same) {
  const auto [it, fresh] = found_.emplace(x, found_.size() + 1);
  same = word(fresh ? 0 : it->second);
  return fresh;
}

bool Guards::object(PyObject* x) {
  if (noting_) {
    facts_.push_back({py::reinterpret_borrow<py::object>(x), 0});
    return true;
  }
  if (next_ >= facts_.size()) {
    return differs("is new");
  }
  auto* const was = facts_[next_].object.ptr();
  if (was == nullptr || !equal(was, x)) {
    return differs(was != nullptr ? "is " + text_of(x) + " and was " + text_of(was) : "is new");
  }
  ++next_;
  return true;
}

bool Guards::word(uint64_t w) {
  if (noting_) {
    facts_.push_back({py::object(), w});
    return true;
  }
  if (next_ >= facts_.size() || facts_[next_].object || facts_[next_].word != w) {
    return differs("is another");
  }
  ++next_;
  return true;
}

// Of nested reports the innermost has the place, the outermost the words.
bool Guards::differs(const std::string& how) {
  where_ = path();
  how_ = how;
  return false;
}

bool Guards::trusts(PyObject* x) {
  const auto known = trusted_.find(x);
  if (known != trusted_.end()) {
    return known->second;
  }
  const bool trusted = policy_.attr("trusts")(py::handle(x)).cast<bool>();
  held_.push_back(py::reinterpret_borrow<py::object>(x));
  return trusted_.emplace(x, trusted).first->second;
}

bool Guards::names(PyObject* name) const {
  return PyUnicode_CheckExact(name) && PySet_Contains(names_.ptr(), name) > 0;
}

const Guards::Kind* Guards::kind_of(PyTypeObject* type) {
  const auto known = kinds_.find(type);
  if (known != kinds_.end()) {
    return &known->second;
  }
  if (!noting_) {
    return nullptr;
  }
  const auto object = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type));
  const auto told = py::tuple(policy_.attr("kind_of")(object, names_));
  held_.push_back(object);
  const Kind kind{static_cast<What>(told[0].cast<int>()), static_cast<Entries>(told[1].cast<int>()),
                  static_cast<Contents>(told[2].cast<int>()), py::tuple(told[3])};
  return &kinds_.emplace(type, kind).first->second;
}

// The names that code of the user's reads; null for others' code.
const Guards::Code* Guards::code_of(PyObject* code, PyObject* globals) {
  auto known = codes_.find(code);
  if (known == codes_.end()) {
    held_.push_back(py::reinterpret_borrow<py::object>(code));
    const auto told = policy_.attr("read_by")(py::handle(code), py::handle(globals), names_);
    std::optional<Code> read;
    if (!told.is_none()) {
      const auto pair = py::tuple(told);
      read = Code{py::tuple(pair[0]), py::tuple(pair[1])};
    }
    known = codes_.emplace(code, std::move(read)).first;
  }
  return known->second ? &*known->second : nullptr;
}

std::string Guards::path() const {
  std::string text;
  for (const auto& [by, name, index] : steps_) {
    switch (by) {
      case Step::By::Variable:
        text = py::handle(name).cast<std::string>();
        break;
      case Step::By::Attribute:
        text += "." + py::handle(name).cast<std::string>();
        break;
      case Step::By::Key:
        text += "[" + (plain(name) ? text_of(name) : std::string("...")) + "]";
        break;
      case Step::By::Index:
        text += "[" + std::to_string(index) + "]";
    }
  }
  return text;
}

void bind_guards(py::module_& m) {
  py::class_<Guards>(m, "Guards")
      .def(py::init<py::object, py::list>(), py::arg("policy"), py::arg("roots"))
      .def("check", &Guards::check, py::arg("made") = std::unordered_set<uint64_t>())
      .def_property_readonly("storages", [](const Guards& g) { return py::set(py::cast(g.storages)); })
      .def_readonly("opaque", &Guards::opaque);
}

}  // namespace torch_xla
