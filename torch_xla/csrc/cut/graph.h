// A graph that was cut: what its program is, and the arguments of the run that it was cut for.
#pragma once
#include <ATen/core/Tensor.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "cut/arguments.h"
#include "cut/cut.h"
#include "tensor/storage.h"

namespace torch_xla {

// Leaves and outputs that travel in one buffer: the outputs take the leaves' places, or there are only leaves, which
// are read, or only outputs.
struct Members {
  std::vector<uint32_t> leaves;
  std::vector<uint32_t> outputs;
};

// What a program is, whatever runs bind to it.
struct Structure {
  Hash key;
  Hash topology;      // hash of operators, result types and edges: equal where only constants differ
  Hash unplaced_key;  // the key without placements: that of a graph whose buffers are all replicated
  Hash equal_key;     // key of a compiled graph with the same program, which `constants_vary` found; or none
  // What a node reads: a leaf, or a result of an earlier node, by their positions.
  struct Edge {
    bool leaf;
    uint32_t from;
    uint32_t index;
  };
  Vector<NodePtr> nodes;  // in recording order
  Vector<Value> outputs;  // in recording order
  Vector<Edge> results;   // the outputs by positions
  c10::ArrayRef<Edge> edges_of(size_t node) const {
    return {edges_.data() + first_edge_[node], first_edge_[node + 1] - first_edge_[node]};
  }
  Vector<bool> donated;                // per leaf: no one needs its buffer after the run
  Vector<int32_t> aliased_outputs;     // per leaf: the output that may take its buffer, or -1
  Vector<uint32_t> output_placements;  // per output: as its tensor is to have it; empty on one device

  // The key with these placements of leaves and outputs.
  Hash key_with_placements(const Vector<uint32_t>& at, const Vector<uint32_t>& to) const {
    return with_placements(unplaced_key, at, to);
  }
  // Per node a hash of its operator, of which of its inputs are leaves, and of the operators that read its results.
  std::vector<Hash> roles() const;

 protected:
  Vector<Edge> edges_;           // of all nodes, one after another
  Vector<uint32_t> first_edge_;  // of each node, and of the one after the last
  static Hash with_placements(Hash hash, const Vector<uint32_t>& at, const Vector<uint32_t>& to);
};

// Nodes of a graph have become leaves, or other nodes, since it was cut: something computed what is pending meanwhile,
// in a signal handler, a finalizer or a hook of the user's. It is to be cut again. What a capture has recorded is
// pending nowhere once that has ended, so that no other barrier computes it: such a graph is never stale.
struct StaleGraph final : std::exception {
  const char* what() const noexcept override { return "[graph] another barrier has run what was cut; cut it again"; }
};

class Graph final : public Structure, public Arguments {
 public:
  Vector<uint32_t> references;  // per node: how often this graph reads it, views know it, and, if it donates, tensors

  // Throws StaleGraph if the graph cannot be run any more, as something else has run meanwhile.
  void check() const;
  // The same before it is run. What a failure gives back, and later graphs are compared with, is that of this cut from
  // now on.
  void begin() override;
  // Finds the numbers and the key: what is a constant, by what is known of operators and earlier graphs now. To be
  // called again where a rule needs another constant (`OpInfo::specialize`); nodes stay as they were recorded.
  void bind();
  Graph(Graph&&) = default;
  Graph& operator=(Graph&&) = delete;
  ~Graph() override { clear(); }

  // Tensors of one shape and dtype, of any size, that the program takes and returns as one array, because a loop over
  // layers computes with them. To be set before the program is compiled, or loaded.
  std::vector<Members> stacks;
  // Per array of such tensors that exists now: the leaves in it, if all its members are leaves of this graph.
  std::vector<std::vector<uint32_t>> resident_stacks() const;

  const Meta& meta(const Edge& edge) const { return (edge.leaf ? leaves : nodes)[edge.from]->meta(edge.index); }

  // Which numbers share a place in the program's vectors. `adopt_scalar_layout` takes the sharing of a program with
  // this key; if numbers that share a place there differ here, it separates them and returns false: the program must be
  // compiled again.
  const std::shared_ptr<const ScalarLayout>& scalar_layout();
  bool adopt_scalar_layout(const std::shared_ptr<const ScalarLayout>& other);

  // Whether a compiled graph differs from this one in constants only. If so, those are inputs from now on, and the
  // graph has another key. If not, this graph is remembered for such comparisons.
  bool constants_vary();

  bool has_collectives() const;

  // Whether the host computes this graph sooner than it is compiled: a few operators on a few values, none random.
  bool fits_host() const;

  // Bytes of the leaves that no tensor references any more: the graph alone keeps them.
  int64_t unreferenced_bytes() const;

  // Donors are lost after a run, so their clones get buffers of their own before it.
  void keep_clones_of_donors() const;
  // To be called before the graph runs asynchronously: what its barrier cut counts as computed from now on, and the
  // host records on. False if no barrier cut this graph.
  bool begin_async();
  // Leaves the graph empty.
  void attach(Vector<Result> values) override;
  // Forgets what was cut, which stays pending. Until it runs, a graph keeps nobody from writing over a buffer.
  void clear();
  // A cut of some of its outputs.
  Cut cut_of(const std::vector<size_t>& which) const;
  // After a failure of these nodes (by their positions) and unfilled leaves, or of the whole graph where there are
  // none: tensors that depend on them get back the values they had at the last barrier; those that had none say why.
  // Gives what is left, if anything, and leaves the graph empty.
  std::vector<Cut> roll_back(const std::string& error, const std::vector<size_t>& failed_nodes = {});

 private:
  friend struct Cut;
  Graph(const Cut& cut, Cut::Purpose purpose);
  void collect(Vector<Value> roots);
  void connect();
  void number_inputs(const Node& node);
  // Numbers that may be constants, in the order of the graph's.
  struct Adaptive {
    Hash rest;               // the key without them
    Vector<size_t> indices;  // which numbers they are
    Vector<uint64_t> positions;
    Vector<uint64_t> values;
    Vector<bool> vary;    // those that were seen to
    Vector<bool> inputs;  // those that are inputs whether they vary or not
  };
  void find_numbers();
  void add_numbers(uint32_t node, Hash& constants);
  void add_number(uint32_t node, uint32_t position);
  void fold_constants();
  void find_donations(const Cut& cut);
  void count_references(int32_t by) const;
  struct Holders;
  Holders find_holders(const Cut& cut);
  void keep_inputs(Holders& holders) const;
  void hash_donations();
  void hash_placements();
  void find_output_placements();
  void release_donors();
  void end_barrier();
  // What a storage has at the cut: null if that is what it had at the last barrier, nothing if it is gone. All wants
  // the recorder's lock.
  using Written = std::optional<std::unordered_map<uint64_t, ValueId>>;  // by storage, the last of before the cut
  std::optional<Value> value_at_cut(const Storage& storage, Written& written) const;
  void remember();
  void drop(Value value);
  void forget_views(bool at_once);
  void remember_numbers() const;

  Hash structure_;                                // operators, result types and edges alone
  Vector<std::pair<uint32_t, uint32_t>> varied_;  // node and argument: constants that were seen to vary since the cut
  const Cut::Scope scope_;
  const uint64_t until_;
  const bool captured_;
  const Cut::Purpose purpose_;
  bool begun_ = false;
  Adaptive adaptive_;
  uint64_t barrier_sequence_ = 0;  // the node sequence, where a barrier cut it
  uint64_t change_ = 0;            // the latest of its device's nodes, at the cut
  std::shared_ptr<const ScalarLayout> scalar_layout_;
  Vector<Value> dropped_values_;  // what views and storages had, to be released after the lock
};

// Forgets the numbers that later graphs are compared with.
void forget_numbers();
// The hash of a call's constant arguments and settings, by what is known of its operator now.
Hash argument_hash(const Node& node);

// Graphs of the device that were cut before are stale.
void note_change(c10::DeviceIndex device);
uint64_t changes_of(c10::DeviceIndex device);

// Makes the buffer of a tensor a donor, or no donor: a program that takes it may write over it, which loses the tensor.
// False where the tensor has no buffer of its own: it is pending, a view, or lost.
bool set_buffer_donor(const at::Tensor& tensor, bool donor);
bool is_buffer_donor(const at::Tensor& tensor);
// Whether a tensor has no value any more.
bool is_lost(const at::Tensor& tensor);

// The buffers that a device's tensors, and what is pending there, have their values in; new references.
std::vector<PyObject*> buffers_on(c10::DeviceIndex device);
// Gives buffers to a device's tensors that are to be filled with a number, which no program has read. Those without
// room lose their value, and the first error is raised.
void fill_tensors(c10::DeviceIndex device);
// As `Graph::roll_back`, for all that depends on some of them, because what computed these failed.
void lose_buffers(c10::DeviceIndex device, const std::vector<PyObject*>& buffers, const std::string& error);

// Whether a barrier on the device would do anything; of what was recorded before `until`, a node sequence.
bool has_pending(c10::DeviceIndex device, uint64_t until);

// The buffer of a tensor whose value is computed, as a new reference, else null.
PyObject* buffer_of(const at::Tensor& tensor);
// The same, perhaps as a part of a larger buffer: enough to read the values.
Location location_of(const at::Tensor& tensor);
// A copy of a tensor's values where they are still on the host.
std::optional<at::Tensor> copy_on_host(const at::Tensor& tensor);

}  // namespace torch_xla
