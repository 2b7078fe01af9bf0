// The import statement, which gives functions of PyTorch's stand-ins for some modules: `_core/torch/stand_ins.py`.
#include <string_view>

#include "bindings/bindings.h"

namespace torch_xla {

namespace {

PyObject* import_before = nullptr;
PyObject* stand_ins = nullptr;  // name -> (what `import name` gives, the stand-in)

// The body of a module or of a class has locals, a function's statement says None.
bool in_function_of_torch(PyObject* globals, PyObject* locals) {
  static PyObject* const key = PyUnicode_InternFromString("__name__");
  if (locals != Py_None || !PyDict_Check(globals)) {
    return false;
  }
  PyObject* name = PyDict_GetItemWithError(globals, key);
  Py_ssize_t size = 0;
  const char* text = name != nullptr && PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, &size) : nullptr;
  const std::string_view module(text != nullptr ? text : "", size);
  return module == "torch" || module.starts_with("torch.");
}

bool knows_all(PyObject* stand_in, PyObject* names) {
  PyObject* attributes = PyModule_GetDict(stand_in);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
    if (PyDict_Contains(attributes, PyTuple_GET_ITEM(names, i)) != 1) {
      return false;
    }
  }
  return true;
}

// The stand-in that a statement gets, borrowed, or null.
PyObject* stand_in_for(PyObject* const* args) {
  PyObject* entry = PyDict_GetItemWithError(stand_ins, args[0]);
  if (entry == nullptr || !in_function_of_torch(args[1], args[2]) ||
      PyDict_Contains(PyImport_GetModuleDict(), args[0]) != 0) {
    return nullptr;
  }
  if (args[3] == Py_None) {
    return PyTuple_GET_ITEM(entry, 0);
  }
  PyObject* stand_in = PyTuple_GET_ITEM(entry, 1);
  return PyTuple_Check(args[3]) && knows_all(stand_in, args[3]) ? stand_in : nullptr;
}

PyObject* import(PyObject* /*self*/, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  if (count == 5 && names == nullptr) {  // name, globals, locals, names of `from`, level: as a statement calls it
    if (PyObject* stand_in = stand_in_for(args)) {
      return Py_NewRef(stand_in);
    }
    PyErr_Clear();
  }
  return PyObject_Vectorcall(import_before, args, count, names);
}

PyMethodDef definition = {"__import__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(import)),
                          METH_FASTCALL | METH_KEYWORDS,
                          "What an import statement calls, with stand-ins for functions of PyTorch's."};

void stand_in_for_torch(const py::dict& modules) {
  TORCH_INTERNAL_ASSERT(import_before == nullptr);
  py::module_ builtins = py::module_::import("builtins");
  stand_ins = py::dict(modules).release().ptr();
  import_before = py::object(builtins.attr("__import__")).release().ptr();
  builtins.attr("__import__") = py::reinterpret_steal<py::object>(PyCFunction_New(&definition, nullptr));
}

}  // namespace

void bind_imports(py::module_& m) { m.def("stand_in_for_torch", &stand_in_for_torch); }

}  // namespace torch_xla
