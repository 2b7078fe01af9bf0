#include "cut/scalar_layout.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "device/random.h"
#include "ir/op_info.h"

namespace torch_xla {

namespace {

// Numbers of one role that are equal now may differ later, which costs a compile: two weights of a loss, say. So many
// equal ones are an optimizer's or a layer's setting.
constexpr uint32_t kFewest = 4;

// A schedule may begin at zero for all.
bool may_share(const NumberSlot& n) { return n.type == NumberSlot::Type::Float && n.number.real() != 0; }

}  // namespace

void NumberSlot::set(const c10::IValue& value) {
  if (value.isInt()) {
    type = Type::Int;
    integer = value.toInt();
  } else if (value.isDouble()) {
    type = Type::Float;
    number = value.toDouble();
  } else {
    type = Type::Complex;
    number = value.toComplexDouble();
  }
}

uint64_t NumberSlot::bits() const {
  auto bits = static_cast<uint64_t>(integer);
  if (type == Type::Float) {
    const double value = number.real();
    std::memcpy(&bits, &value, sizeof(bits));
  }
  return bits;
}

ScalarLayout::ScalarLayout(const Vector<NumberSlot>& numbers, const std::vector<Hash>& roles) {
  struct Class {
    uint32_t count = 0;
    int64_t index = -1;
  };
  std::unordered_map<Hash, Class, HashHasher> classes;
  const auto class_of = [&](const NumberSlot& n) -> Class& {
    auto hash = roles.at(n.node);
    hash.mix(static_cast<uint64_t>(n.position) << 32 | n.element);
    hash.mix(n.number.real());
    return classes[hash];
  };
  for (const auto& n : numbers) {
    if (may_share(n)) {
      ++class_of(n).count;
    }
  }
  indices.reserve(numbers.size());
  for (const auto& n : numbers) {
    auto* const shared = may_share(n) ? &class_of(n) : nullptr;
    if (shared == nullptr || shared->count < kFewest) {
      add(n.type, sizes[static_cast<size_t>(n.type)]);
      continue;
    }
    if (shared->index < 0) {
      shared->index = sizes[static_cast<size_t>(n.type)];
    }
    add(n.type, static_cast<uint32_t>(shared->index));
  }
}

void ScalarLayout::add(NumberSlot::Type type, uint32_t index) {
  indices.push_back(index);
  auto& size = sizes[static_cast<size_t>(type)];
  size = std::max(size, index + 1);
}

Vector<bool> ScalarLayout::broken(const Vector<NumberSlot>& numbers) const {
  std::vector<const NumberSlot*> first(sizes[static_cast<size_t>(NumberSlot::Type::Float)], nullptr);
  Vector<bool> broken(first.size(), false);
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i].type != NumberSlot::Type::Float) {
      continue;
    }
    auto*& one = first[indices[i]];
    if (one == nullptr) {
      one = &numbers[i];
    } else if (one->bits() != numbers[i].bits()) {
      broken[indices[i]] = true;
    }
  }
  return broken;
}

bool ScalarLayout::holds(const Vector<NumberSlot>& numbers) const {
  const auto broken_indices = broken(numbers);
  return std::find(broken_indices.begin(), broken_indices.end(), true) == broken_indices.end();
}

ScalarLayout ScalarLayout::unbroken(const Vector<NumberSlot>& numbers) const {
  const auto broken_indices = broken(numbers);
  ScalarLayout result;
  std::unordered_map<uint32_t, uint32_t> moved;
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto type = numbers[i].type;
    const auto next = result.sizes[static_cast<size_t>(type)];
    const bool separate = type != NumberSlot::Type::Float || broken_indices[indices[i]];
    result.add(type, separate ? next : moved.try_emplace(indices[i], next).first->second);
  }
  return result;
}

NumberVectors ScalarLayout::pack(const Vector<NumberSlot>& numbers) const {
  NumberVectors vectors;
  const auto put = [&](size_t i, auto value) {
    const auto type = static_cast<size_t>(numbers[i].type);
    vectors[type].resize(sizes[type] * sizeof(value));
    std::memcpy(&vectors[type][indices[i] * sizeof(value)], &value, sizeof(value));
  };
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto& n = numbers[i];
    switch (n.type) {
      case NumberSlot::Type::Float:
        wide_floats ? put(i, n.number.real()) : put(i, static_cast<float>(n.number.real()));
        break;
      case NumberSlot::Type::Int:
        wide_integers ? put(i, n.integer) : put(i, static_cast<int32_t>(n.integer));
        break;
      case NumberSlot::Type::Complex:
        wide_floats ? put(i, n.number) : put(i, static_cast<c10::complex<float>>(n.number));
        break;
      case NumberSlot::Type::Seed: {
        const auto key = random_key(n.integer, numbers[i + 1].integer);
        put(i, static_cast<uint32_t>(key >> 32));
        put(++i, static_cast<uint32_t>(key));
        break;
      }
    }
  }
  return vectors;
}

std::array<const char*, 4> number_types() {
  return {wide_floats ? "f8" : "f4", wide_integers ? "i8" : "i4", wide_floats ? "c16" : "c8", "u4"};
}

}  // namespace torch_xla
