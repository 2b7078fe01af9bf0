// Where each number of a graph is in the vectors that a program takes, one vector per type. Equal ones share an index:
// an optimizer gives hundreds of operators the same learning rate, and XLA compiles kernels that read one index once.
#pragma once
#include <ATen/core/ivalue.h>
#include <c10/util/complex.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/hash.h"
#include "base/pool.h"

namespace torch_xla {

// One argument number that is an input of the program.
struct NumberSlot {
  enum class Type : uint8_t { Float, Int, Complex, Seed } type;
  int64_t integer = 0;
  c10::complex<double> number;
  uint32_t node = 0;                             // whose argument it is
  uint32_t position = 0;                         // which one
  uint32_t element = 0;                          // which of a list
  static constexpr uint32_t kSeed = UINT32_MAX;  // none of its arguments: its seed, or the offset

  void set(const c10::IValue& value);
  uint64_t bits() const;  // of an integer or a float
  // A number for its place in the graph; it ascends with the place.
  uint64_t where() const { return uint64_t{node} << 32 | uint64_t{position} << 24 | (element & 0xFFFFFF); }
};

// The numbers of a graph as a program takes them: the bytes of a vector of each type, and what they are, as NumPy has
// it. A seed with its offset is one number of 64 bits, in two words.
using NumberVectors = std::array<std::string, 4>;
std::array<const char*, 4> number_types();

class ScalarLayout {
 public:
  // Floats share an index if they are equal now and are the same argument of nodes with equal `roles` (one per node).
  ScalarLayout(const Vector<NumberSlot>& numbers, const std::vector<Hash>& roles);

  // Whether numbers that share an index are equal here too; these are of a graph with the same key.
  bool holds(const Vector<NumberSlot>& numbers) const;
  // The same with an index of its own for each number that does not agree here.
  ScalarLayout unbroken(const Vector<NumberSlot>& numbers) const;
  NumberVectors pack(const Vector<NumberSlot>& numbers) const;

  std::vector<uint32_t> indices;    // per number: where it is in the vector of its type
  std::array<uint32_t, 4> sizes{};  // of the vectors, by type

 private:
  ScalarLayout() = default;
  void add(NumberSlot::Type type, uint32_t index);
  Vector<bool> broken(const Vector<NumberSlot>& numbers) const;
};

}  // namespace torch_xla
