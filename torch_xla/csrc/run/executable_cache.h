// Looking up: the executables of the process by graph and settings, and running the one that is known.
#pragma once
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <list>
#include <memory>
#include <unordered_map>

#include "cut/graph.h"
#include "run/program.h"

namespace torch_xla {

class ExecutableCache {
 public:
  // The executable of a graph, as the pipeline knows it, or None. The graph's numbers travel as it takes them from now
  // on; where it takes two as one that differ here, it is none for this graph.
  py::object find(Graph& graph, uint64_t settings);
  // Whether it has one, without taking notice of the question.
  bool knows(const Graph& graph, uint64_t settings) const;
  // Finds it and runs the graph; false if there is none.
  bool run(Graph& graph, uint64_t settings);
  void add(const Graph& graph, uint64_t settings, py::object executable, std::shared_ptr<Program> program);

  // Drops those that were used longest ago.
  void drop(size_t count);
  // Drops all, and what is known of numbers that vary and of host partitions.
  void clear();
  size_t size() const { return entries_.size(); }
  py::list values() const;  // the one used longest ago first

  uint64_t hits = 0;

 private:
  struct Key {
    Hash graph;
    uint64_t settings;
    bool operator==(const Key& other) const { return graph == other.graph && settings == other.settings; }
  };
  struct KeyHasher {
    size_t operator()(const Key& key) const { return HashHasher()(key.graph) ^ key.settings; }
  };
  struct Entry {
    Key key;
    py::object executable;
    std::shared_ptr<Program> program;
  };
  void insert(Entry entry);
  const Entry* look_up(Graph& graph, uint64_t settings);

  std::list<Entry> entries_;  // in order of use
  std::unordered_map<Key, std::list<Entry>::iterator, KeyHasher> index_;
};

}  // namespace torch_xla
