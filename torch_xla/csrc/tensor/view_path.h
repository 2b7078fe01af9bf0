// Steps of a view: how its value follows from the storage's, and the storage's from what was written to the view.
#pragma once
#include <utility>
#include <vector>

#include "tensor/storage.h"

namespace torch_xla {

// The value of a step's output.
Value forward(const ViewStep& step, const Value& in);
// The value of a step's input after its output became `v`; `base` is the input's value before.
Value inverse(const ViewStep& step, const Value& base, const Value& v);

ViewPath make_step(ViewPath parent, OpInfo& op, Args args, MetaRef in, MetaSetPtr out);
// A path to memory as torch.as_strided addresses it.
ViewPath strided_path(const MetaRef& base, const MetaRef& meta);
// The steps from the storage to the view.
std::vector<const ViewStep*> steps_of(const ViewPath& path);
// Whether a view shows the conjugate, and the negative, of what is in memory.
struct LazyBits {
  bool conjugate = false;
  bool negative = false;
  bool operator==(const LazyBits& other) const { return conjugate == other.conjugate && negative == other.negative; }
};
LazyBits lazy_bits_of(const ViewPath& path);
// The path to what `path` shows, with these signs.
ViewPath with_lazy_bits(ViewPath path, const LazyBits& bits, const MetaRef& meta);
// Whether a view shows the storage's own elements in their own places, as the transpose of a transpose does.
bool shows_storage(const ViewPath& path, const Meta& base);

// Where an expanded tensor was written, the element that changed stands for all that share its memory. Returns the
// value with one element for each, and its shape.
std::pair<Value, MetaRef> without_overlap(Value v, Value old, MetaRef meta);
// The value in memory order, with what nobody has written behind it.
Value padded(const Value& v, const MetaRef& meta, const MetaRef& grown);

}  // namespace torch_xla
