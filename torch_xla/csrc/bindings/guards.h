// What the code of a step can see of Python, compared with what it saw when it was recorded.
//
// One walk visits all that can be reached from a function and yields a sequence of facts: first to note them, later to
// compare. Objects are told by the order in which they are found, so that nothing of them is kept; types, code and
// plain values are. What is visited, of which types, is `_core/replay/guards.py`'s to say.
#pragma once
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace torch_xla {

class Guards {
 public:
  Guards(const py::object& policy, const py::list& roots);
  // None, or (what differs, how) where not all is as it was. A tensor may have one of the storages of `made` instead of
  // the one it had.
  py::object check(const std::unordered_set<uint64_t>& made);

  std::vector<uint64_t> storages;   // of tensors that were found
  std::vector<std::string> opaque;  // what cannot be compared

 private:
  enum class What : uint8_t { Value, Same, Tensor, Array, Function, Cell, Module, Class, Object, Opaque };
  enum class Entries : uint8_t { None, Named, All };  // of __dict__
  enum class Contents : uint8_t { None, Items, Pairs, Referent };
  struct Kind {
    What what;
    Entries entries;
    Contents contents;
    py::tuple attributes;
  };
  struct Fact {
    py::object object;
    uint64_t word = 0;
  };
  struct Code {
    py::tuple globals;
    py::tuple modules;  // that it imports
  };
  struct Step {
    enum class By : uint8_t { Variable, Attribute, Key, Index } by;
    PyObject* name;
    Py_ssize_t index;
  };
  static constexpr size_t kMost = 1 << 20;  // facts
  static constexpr size_t kDeepest = 200;

  bool begin();
  bool visit(PyObject* x);
  bool visit_at(Step::By by, PyObject* name, PyObject* x, Py_ssize_t index = 0);
  bool visit_kind(PyObject* x, const Kind& kind);
  bool visit_tensor(PyObject* x);
  bool visit_function(PyObject* x);
  bool visit_class(PyObject* x);
  bool visit_entries(PyObject* dict, bool named, bool functions = false);
  bool visit_items(PyObject* x);
  bool visit_pairs(PyObject* dict);
  bool visit_bytes(PyObject* x);
  bool visit_opaque(PyObject* x);
  // Whether it is found for the first time; `same` says whether it was then.
  bool enter(PyObject* x, bool& same);
  bool object(PyObject* x);
  bool word(uint64_t w);
  bool differs(const std::string& how);
  bool trusts(PyObject* x);
  bool names(PyObject* name) const;
  const Kind* kind_of(PyTypeObject* type);
  const Code* code_of(PyObject* code, PyObject* globals);
  std::string path() const;

  py::object policy_;
  py::list roots_;    // (name, object)
  py::set names_;     // that the code has
  bool all_ = false;  // attributes count, named or not
  std::vector<Fact> facts_;
  std::unordered_map<PyTypeObject*, Kind> kinds_;
  std::unordered_map<PyObject*, std::optional<Code>> codes_;
  std::unordered_map<PyObject*, bool> trusted_;
  std::vector<py::object> held_;  // keys of these
  // Of the walk.
  bool noting_ = false;
  size_t next_ = 0;
  const std::unordered_set<uint64_t>* made_ = nullptr;
  ska::flat_hash_map<PyObject*, uint64_t> found_;
  std::vector<Step> steps_;
  std::string where_;
  std::string how_;
};

}  // namespace torch_xla
