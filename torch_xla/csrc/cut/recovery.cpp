// After a failure: which tensors have no value any more, and what of a graph can still be run.
#include <Python.h>

#include <algorithm>
#include <iterator>
#include <unordered_set>

#include "cut/cut.h"
#include "cut/graph.h"
#include "cut/reach.h"

namespace torch_xla {

namespace {

// Takes back what depends on the nodes and leaves for which `bad` holds: a tensor gets the value it had at the last
// barrier, or says why it has none. `roots` are values beside those of tensors that the marks shall be right for. Wants
// the recorder's lock; `old` is to be destroyed after it is gone.
template <class Bad>
void roll_back_storages(c10::DeviceIndex device, Vector<Value>& roots, const Bad& bad, const std::string& error,
                        Vector<Value>& old) {
  note_change(device);
  next_epoch();
  auto all = roots;
  for_each_storage(device, [&](Storage& s) {
    resolve(s.value);
    all.push_back(s.value);
    if (s.pending_commit) {
      all.push_back(s.pending_commit);
    }
  });
  auto nodes = reach(all);
  sort_by_sequence(nodes);
  const auto lost = [&](const Value& v) { return v.node->leaf() ? bad(*v.node) : v.node->marked; };
  for (auto* node : nodes) {
    node->marked = bad(*node) || std::any_of(node->inputs.begin(), node->inputs.end(), lost);
  }
  for (auto& root : roots) {
    resolve(root);
  }
  roots.erase(std::remove_if(roots.begin(), roots.end(), lost), roots.end());
  for_each_storage(device, [&](Storage& s) {
    for (auto* saved : {&s.initial_fill, &s.committed, &s.pending_commit}) {
      if (*saved && lost(*saved)) {
        old.push_back(std::exchange(*saved, {}));
      }
    }
    s.settle(old);
    if (lost(s.value)) {
      s.roll_back(make_lost(s.meta, error), old);
    }
  });
  std::move(all.begin(), all.end(), std::back_inserter(old));
}

}  // namespace

std::vector<Cut> Graph::roll_back(const std::string& error, const std::vector<size_t>& failed_nodes) {
  std::unordered_set<const Node*> bad;
  for (const auto i : failed_nodes) {
    bad.insert(nodes.at(i).get());
  }
  for (const auto i : unfilled) {
    bad.insert(leaves.at(i).get());
  }
  const bool named = !bad.empty();
  if (!named) {
    std::transform(nodes.begin(), nodes.end(), std::inserter(bad, bad.end()), [](const NodePtr& n) { return n.get(); });
  }
  Cut rest{device, {}, outputs};
  Vector<Value> old;
  {
    const RecorderLock lock;
    remember();
    roll_back_storages(device, rest.values, [&](const Node& n) { return bad.count(&n) != 0; }, error, old);
  }
  clear();
  const auto pending = [](const Value& v) { return !v.node->leaf(); };
  return named && std::any_of(rest.values.begin(), rest.values.end(), pending) ? std::vector<Cut>{std::move(rest)}
                                                                               : std::vector<Cut>();
}

Cut Graph::cut_of(const std::vector<size_t>& which) const {
  Cut cut{device};
  for (const auto i : which) {
    cut.values.push_back(outputs.at(i));
  }
  return cut;
}

void fill_tensors(c10::DeviceIndex device) {
  Vector<NodePtr> leaves;
  if (NumberFill::living.load(std::memory_order_relaxed) > 0) {
    const RecorderLock lock;
    for_each_storage(device, [&](Storage& s) {
      resolve(s.value);
      if (s.value.node->is(Source::Kind::NumberFill)) {
        leaves.push_back(s.value.node);
      }
    });
  }
  std::vector<size_t> failed;
  try {
    fetch_fills(leaves, failed);
  } catch (const std::exception&) {
    std::unordered_set<const Node*> bad;
    for (const auto i : failed) {
      bad.insert(leaves[i].get());
    }
    Vector<Value> none, old;
    const RecorderLock lock;
    roll_back_storages(
        device, none, [&](const Node& n) { return bad.count(&n) != 0; },
        "[memory] got a tensor for whose values there was no room; make it again, smaller", old);
    throw;
  }
}

std::vector<PyObject*> buffers_on(c10::DeviceIndex device) {
  std::unordered_set<PyObject*> buffers;
  Vector<Value> roots;  // destroyed after the lock is gone
  const RecorderLock lock;
  const auto add = [&](const Value& v) {
    auto* const buffer = v && v.node->leaf() ? find_values(*v.node).buffer : nullptr;
    if (buffer != nullptr) {
      buffers.insert(buffer);
    }
  };
  next_epoch();
  for_each_storage(device, [&](Storage& s) {
    resolve(s.value);
    add(s.committed);
    roots.push_back(s.value);
  });
  for (const auto* const node : reach(roots)) {
    std::for_each(node->inputs.begin(), node->inputs.end(), add);
  }
  std::for_each(roots.begin(), roots.end(), add);
  for (auto* const buffer : buffers) {
    Py_INCREF(buffer);
  }
  return {buffers.begin(), buffers.end()};
}

void lose_buffers(c10::DeviceIndex device, const std::vector<PyObject*>& buffers, const std::string& error) {
  const std::unordered_set<PyObject*> failed(buffers.begin(), buffers.end());
  Vector<Value> none, old;
  const RecorderLock lock;
  roll_back_storages(
      device, none, [&](const Node& n) { return n.leaf() && failed.count(find_values(n).buffer) != 0; }, error, old);
}

}  // namespace torch_xla
