// The Python module `torch_xla._C`.
#include "bindings/bindings.h"

namespace torch_xla {

PYBIND11_MODULE(_C, m) {
  bind_graphs(m);
  bind_runs(m);
  bind_tensors(m);
  bind_recorder(m);
  bind_collectives(m);
  bind_loops(m);
  bind_imports(m);
  bind_calls(m);
}

}  // namespace torch_xla
