#include "record/eager_checks.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/fork.h"
#include "base/python_hooks.h"
#include "ir/op_info.h"
#include "record/meta_cache.h"
#include "tensor/tensor_impl.h"

namespace torch_xla {

namespace {

using c10::IValue;
using Arguments = c10::ArrayRef<IValue>;

bool any_below(const IValue& list, int64_t least) {
  const auto numbers = list.toIntVector();
  return std::any_of(numbers.begin(), numbers.end(), [&](int64_t n) { return n < least; });
}

bool doubtful_multinomial(Arguments a) {
  const auto& self = a[0].toTensor();
  const auto count = a[1].toInt();
  TORCH_CHECK(self.dim() == 0 || self.size(-1) <= (int64_t{1} << 24), "number of categories cannot exceed 2^24");
  return !self.is_floating_point() || self.dim() < 1 || self.dim() > 2 || count <= 0 ||
         (!a[2].toBool() && count > self.size(-1)) ||
         (a.size() > 4 && a[4].isTensor() && a[4].toTensor().scalar_type() != at::kLong);
}

bool doubtful_complex(Arguments a) {
  const auto type = a[0].toTensor().scalar_type();
  return type != a[1].toTensor().scalar_type() ||
         (a.size() > 2 && a[2].toTensor().scalar_type() != c10::toComplexType(type));
}

bool doubtful_aminmax_out(Arguments a) {
  const auto type = a[0].toTensor().scalar_type();
  return a[3].toTensor().scalar_type() != type || a[4].toTensor().scalar_type() != type;
}

bool no_index(const at::Tensor& t) { return t.scalar_type() != at::kLong && t.scalar_type() != at::kInt; }

bool doubtful_index_add(Arguments a) {
  const auto& self = a[0].toTensor();
  const auto& source = a[3].toTensor();
  if (no_index(a[2].toTensor()) || self.dim() != source.dim() || self.dim() == 0) {
    return true;
  }
  const auto dim = a[1].toInt() < 0 ? a[1].toInt() + self.dim() : a[1].toInt();
  for (int64_t d = 0; d < self.dim(); ++d) {
    if (d != dim && self.size(d) != source.size(d)) {
      return true;
    }
  }
  return false;
}

// PyTorch's Meta kernels of products take any types.
bool mixes_types(Arguments a) {
  const auto type = a[0].toTensor().scalar_type();
  return std::any_of(a.begin() + 1, a.end(),
                     [&](const IValue& v) { return v.isTensor() && v.toTensor().scalar_type() != type; });
}

template <class Test>
bool any_type(Arguments a, Test test) {
  return std::any_of(a.begin(), a.end(), [&](const IValue& v) {
    return v.isTensor() && v.toTensor().defined() && test(v.toTensor().scalar_type());
  });
}

bool is_integer(at::ScalarType type) { return at::isIntegralType(type, /*includeBool=*/true); }

bool any_float(Arguments a) { return any_type(a, &at::isFloatingType); }

bool any_integer(Arguments a) { return any_type(a, &is_integer); }

// PyTorch's Meta kernels take a complex number for real tensors.
bool complex_for_real(Arguments a) {
  return !at::isComplexType(a[0].toTensor().scalar_type()) &&
         std::any_of(a.begin(), a.end(), [](const IValue& v) { return v.isComplexDouble(); });
}

// PyTorch's Meta kernels take the shape of the first tensor.
bool integer_or_of_other_shape(Arguments a) {
  return any_integer(a) || a[0].toTensor().sizes() != a[1].toTensor().sizes();
}

bool any_but_real(Arguments a) {
  return any_type(a, [](at::ScalarType type) { return !at::isFloatingType(type); });
}

// Of other indices and offsets the CPU kernel writes beside its tensors; functions of torch.nn make them so.
bool doubtful_bags(Arguments a) {
  for (const auto position : {1, 2}) {
    TORCH_CHECK_VALUE(a[position].toTensor().dim() == 1, position == 1 ? "input" : "offsets",
                      " has to be a 1D Tensor, but got Tensor of dimension ", a[position].toTensor().dim());
  }
  return false;
}

bool no_probability(const IValue& p) { return !(p.toDouble() >= 0 && p.toDouble() <= 1); }

bool doubtful_dropout(Arguments a) { return any_integer(a) || no_probability(a[1]); }

// A result that was written in place does not tell what the input was.
bool lost_sign(Arguments a) { return a[3].toBool() && a[2].toScalar().toDouble() < 0; }

bool doubtful_index(Arguments a) { return no_index(a[2].toTensor()); }

// Masks must have the sizes of the dimensions that they stand for.
bool doubtful_index_put(Arguments a) {
  const auto& self = a[0].toTensor();
  int64_t dim = 0;
  for (const auto& v : a[1].toListRef()) {
    const bool given = v.isTensor() && v.toTensor().defined();
    if (given && (v.toTensor().scalar_type() == at::kBool || v.toTensor().scalar_type() == at::kByte)) {
      for (const auto size : v.toTensor().sizes()) {
        if (dim == self.dim() || self.size(dim++) != size) {
          return true;
        }
      }
    } else if (++dim > self.dim() || (given && no_index(v.toTensor()))) {
      return true;
    }
  }
  return false;
}

at::ScalarType type_of(const IValue& dtype) { return dtype.isNone() ? at::kLong : dtype.toScalarType(); }

// Whether integers from `low` to below `high` may be none, or none that the type has.
bool doubtful_range(int64_t low, int64_t high, at::ScalarType type) {
  const auto bits = type == at::kBool ? 1 : 8 * c10::elementSize(type);
  const bool narrow = at::isIntegralType(type, /*includeBool=*/true) && bits < 64;
  const bool is_signed = narrow && type != at::kBool && c10::isSignedType(type);
  const int64_t above = narrow ? int64_t{1} << (is_signed ? bits - 1 : bits) : 0;
  return low >= high || (narrow && (high > above || low < (is_signed ? -above : 0)));
}

bool without_pivots(Arguments a) { return !a[1].toBool(); }

bool integer_to_negative(Arguments a) {
  const auto& exponent = a[1].toScalar();
  return exponent.isIntegral(true) && exponent.toLong() < 0 && at::isIntegralType(a[0].toTensor().scalar_type(), true);
}

// Whether a call that writes `written` and reads `read` may be refused: where they overlap in part, and where they are
// the same elements but the operator does not go element by element.
bool may_overlap(const OpInfo& info, const at::Tensor& written, const at::Tensor& read) {
  const auto storage_of = [](const at::Tensor& t) {
    return t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  };
  if (storage_of(written) != storage_of(read)) {
    return false;
  }
  const auto status = at::get_overlap_status(written, read);
  return status == at::MemOverlapStatus::Partial ||
         (status == at::MemOverlapStatus::Full && !info.op.hasTag(at::Tag::pointwise));
}

template <class Visit>
void for_each_tensor(const IValue& v, Visit visit) {
  if (v.isTensor()) {
    if (v.toTensor().defined()) {
      visit(v.toTensor());
    }
  } else if (v.isTensorList()) {
    for (const at::Tensor& t : v.toTensorList()) {
      visit(t);
    }
  }
}

bool overlaps(const OpInfo& info, Arguments arguments) {
  bool found = false;
  for (const auto position : info.written) {
    const auto& w = arguments[position];
    if (!w.isTensor() || !is_xla(w.toTensor())) {
      continue;
    }
    found = found || at::has_internal_overlap(w.toTensor()) == at::MemOverlap::Yes;
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (i != position) {
        for_each_tensor(arguments[i],
                        [&](const at::Tensor& t) { found = found || may_overlap(info, w.toTensor(), t); });
      }
    }
  }
  return found;
}

// What an overlap depends on: where in which of the call's storages each tensor is.
Hash geometry(const OpInfo& info, Arguments arguments) {
  Hash key = info.hash;
  std::vector<const c10::StorageImpl*> storages;
  for (const auto& v : arguments) {
    for_each_tensor(v, [&](const at::Tensor& t) {
      const auto* const storage = is_xla(t) ? t.storage().unsafeGetStorageImpl() : nullptr;
      const auto place = std::find(storages.begin(), storages.end(), storage);
      key.mix(static_cast<uint64_t>(place - storages.begin()));
      if (place == storages.end()) {
        storages.push_back(storage);
      }
      key.mix(static_cast<uint64_t>(t.scalar_type()));
      key.mix(static_cast<uint64_t>(t.storage_offset()));
      for (int64_t d = 0; d < t.dim(); ++d) {
        key.mix(static_cast<uint64_t>(t.size(d)));
        key.mix(static_cast<uint64_t>(t.stride(d)));
      }
    });
  }
  return key;
}

// Whether the CPU accepted an overlap of this form before.
bool accepted_before(const Hash& key, bool remember) {
  constexpr size_t kCapacity = 1 << 14;
  static ForkSafe<std::mutex, LockOrder::Refusals> mutex;
  static auto* const accepted = new std::unordered_set<Hash, HashHasher>();
  const std::lock_guard<std::mutex> lock(mutex);
  if (remember) {
    if (accepted->size() >= kCapacity) {
      accepted->clear();
    }
    accepted->insert(key);
  }
  return accepted->count(key) != 0;
}

// The doubt about an operator such as "aten.multinomial.default", or null.
Doubt doubt_about(const std::string& name) {
  static const auto* const table = new std::unordered_map<std::string, Doubt>{
      {"aten.uniform_.default",
       [](Arguments a) { return !a[0].toTensor().is_floating_point() || a[1].toDouble() > a[2].toDouble(); }},
      {"aten.bernoulli.default", [](Arguments a) { return is_integer(a[0].toTensor().scalar_type()); }},
      {"aten.bernoulli_.Tensor", [](Arguments a) { return is_integer(a[1].toTensor().scalar_type()); }},
      {"aten.bernoulli_.float", [](Arguments a) { return no_probability(a[1]); }},
      {"aten.bernoulli.p", [](Arguments a) { return no_probability(a[1]); }},
      {"aten.random_.from",
       [](Arguments a) {
         return !a[2].isNone() && doubtful_range(a[1].toInt(), a[2].toInt(), a[0].toTensor().scalar_type());
       }},
      {"aten.random_.to", [](Arguments a) { return doubtful_range(0, a[1].toInt(), a[0].toTensor().scalar_type()); }},
      {"aten.randint.low", [](Arguments a) { return doubtful_range(a[0].toInt(), a[1].toInt(), type_of(a[3])); }},
      {"aten.randint.default", [](Arguments a) { return doubtful_range(0, a[0].toInt(), type_of(a[2])); }},
      {"aten.pow.Tensor_Scalar", &integer_to_negative},
      {"aten.pow_.Scalar", &integer_to_negative},
      {"aten.linalg_lu.default", &without_pivots},
      {"aten.linalg_lu.out", &without_pivots},
      {"aten.linalg_lu_factor_ex.default", &without_pivots},
      {"aten.linalg_lu_factor_ex.out", &without_pivots},
      {"aten.aminmax.out", &doubtful_aminmax_out},
      {"aten.multinomial.default", &doubtful_multinomial},
      {"aten.multinomial.out", &doubtful_multinomial},
      {"aten.complex.default", &doubtful_complex},
      {"aten.complex.out", &doubtful_complex},
      {"aten.masked_scatter.default", [](Arguments a) { return a[1].toTensor().scalar_type() != at::kBool; }},
      {"aten.masked_scatter_.default", [](Arguments a) { return a[1].toTensor().scalar_type() != at::kBool; }},
      {"aten.bucketize.Tensor", [](Arguments a) { return a[1].toTensor().dim() != 1; }},
      {"aten.index_add.default", &doubtful_index_add},
      {"aten.index_add_.default", &doubtful_index_add},
      {"aten.index_put.default", &doubtful_index_put},
      {"aten.index_put_.default", &doubtful_index_put},
      {"aten.put.default", [](Arguments a) { return a[1].toTensor().scalar_type() != at::kLong; }},
      {"aten.put_.default", [](Arguments a) { return a[1].toTensor().scalar_type() != at::kLong; }},
      {"aten.convolution.default",
       [](Arguments a) { return any_below(a[3], 1) || any_below(a[4], 0) || any_below(a[5], 1); }},
  };
  // By the operator's name, for all its overloads and for those that write to their first argument.
  static const auto* const families = new std::unordered_map<std::string, Doubt>{
      {"aten.mm", &mixes_types},
      {"aten.linear", &mixes_types},
      {"aten.addmm", &mixes_types},
      {"aten._addmm_activation", &mixes_types},
      {"aten.linalg_cross", &mixes_types},
      {"aten.addbmm", &mixes_types},
      {"aten.addcmul", &complex_for_real},
      {"aten.addcdiv", &complex_for_real},
      {"aten.lerp", &complex_for_real},
      {"aten.normal", &any_but_real},
      {"aten.poisson", &any_integer},
      {"aten.binomial", &integer_or_of_other_shape},
      {"aten.rrelu_with_noise", &integer_or_of_other_shape},
      {"aten.rrelu_with_noise_functional", &integer_or_of_other_shape},
      {"aten.bitwise_and", &any_float},
      {"aten.bitwise_or", &any_float},
      {"aten.bitwise_xor", &any_float},
      {"aten.bitwise_not", &any_float},
      {"aten.bitwise_left_shift", &any_float},
      {"aten.bitwise_right_shift", &any_float},
      {"aten.gcd", &any_float},
      {"aten.lcm", &any_float},
      {"aten.index_select", &doubtful_index},
      {"aten.index_fill", &doubtful_index},
      {"aten.index_copy", &doubtful_index},
      {"aten.index_reduce", &doubtful_index},
      {"aten._embedding_bag", &doubtful_bags},
      {"aten._embedding_bag_forward_only", &doubtful_bags},
      {"aten.leaky_relu_backward", &lost_sign},
      {"aten.native_dropout", &doubtful_dropout},
  };
  const auto found = table->find(name);
  if (found != table->end()) {
    return found->second;
  }
  const auto dot = name.rfind('.');
  if (name.compare(dot, 6, ".dtype") == 0) {
    return nullptr;  // made to mix types
  }
  const auto family = families->find(name.substr(0, name[dot - 1] == '_' ? dot - 1 : dot));
  return family == families->end() ? nullptr : family->second;
}

const bool installed = (set_doubts(&doubt_about), true);

}  // namespace

void raise_if_refused(const OpInfo& info, Arguments arguments) {
  if (info.doubt != nullptr && info.doubt(arguments)) {
    raise_as_cpu(info, arguments, kAnySize);
  }
  if (!info.written.empty() && overlaps(info, arguments)) {
    const auto key = geometry(info, arguments);
    if (!accepted_before(key, false)) {
      raise_as_cpu(info, arguments);
      accepted_before(key, true);
    }
  }
}

namespace {

// Whether an index is a mask, whose values decide on shapes.
bool masked(const OpInfo& info, Arguments arguments) {
  const auto is_mask = [](const IValue& e) {
    return e.isTensor() && e.toTensor().defined() &&
           (e.toTensor().scalar_type() == at::kBool || e.toTensor().scalar_type() == at::kByte);
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (info.kinds[i] == ArgKind::OptTensorList && arguments[i].isList()) {
      const auto elements = arguments[i].toListRef();
      if (std::any_of(elements.begin(), elements.end(), is_mask)) {
        return true;
      }
    }
  }
  return false;
}

bool says_any(const std::string& text, std::initializer_list<const char*> words) {
  return std::any_of(words.begin(), words.end(), [&](const char* w) { return text.find(w) != std::string::npos; });
}

}  // namespace

void raise_if_kernel_refuses(const OpInfo& info, Arguments arguments) {
  const bool backward = info.name.find("_backward") != std::string::npos;
  constexpr size_t kBytes = size_t{1} << 16;
  size_t bytes = 0;
  bool empty = false;
  bool narrow = false;
  bool unusual = false;
  bool mixed = false;
  bool integer = false;
  auto first = at::ScalarType::Undefined;
  bool number = false;  // one that many kernels do not take
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& v = arguments[i];
    number = number || (info.kinds[i] == ArgKind::Number && (v.isComplexDouble() || v.isBool()));
    for_each_tensor(v, [&](const at::Tensor& t) {
      const auto type = t.scalar_type();
      bytes += is_xla(t) ? t.storage().nbytes() : 0;
      empty = empty || (t.numel() == 0 && !info.is_out[i]);
      narrow = narrow || (t.element_size() < 4 && at::isFloatingType(type));
      integer = integer || at::isIntegralType(type, true);
      unusual = unusual || integer || at::isComplexType(type);
      first = first == at::ScalarType::Undefined ? type : first;
      mixed = mixed || type != first;
    });
  }
  mixed = mixed || (number && first != at::ScalarType::Undefined);
  const bool has_kernel = info.op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
  // Kernels of other devices take integers too, and libraries give them some, as to count the tokens of each expert.
  const bool wider = integer && info.name.rfind("aten.histc.", 0) == 0;
  const bool draws =
      info.seeded && std::find(info.kinds.begin(), info.kinds.end(), ArgKind::Generator) == info.kinds.end();
  // The program would call the CPU kernel, which has fewer 16-bit types than XLA.
  const bool called =
      narrow && !backward && !is_lowered(info.functional != nullptr ? info.functional->name : info.name);
  const bool runs = !draws && !wider && info.name.rfind("aten.", 0) == 0 &&
                    (has_kernel || ((mixed || unusual || called) && !info.view &&
                                    info.op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)));
  // Floating-point types are mixed seldom, and mostly by mistake.
  if (!runs || bytes > (mixed && !integer ? kSmall : kBytes) || !(empty || mixed || called || (unusual && !narrow))) {
    return;
  }
  // A backward operator gets what its forward gave; statistics of 16-bit tensors are float32 here, unlike on the CPU.
  if (backward && (narrow || empty)) {
    return;
  }
  std::string text;
  const auto says = [&](const char* words) { return text.find(words) != std::string::npos; };
  try {
    raise_as_cpu(info, arguments);
  } catch (const c10::NotImplementedError& error) {
    text = error.what_without_backtrace();
    // PyTorch leaves uint16, uint32 and uint64 to compilers, and has few kernels for them.
    if (says("not implemented for 'UInt") &&
        is_lowered(info.functional != nullptr ? info.functional->name : info.name)) {
      return;
    }
    // Not of an operator that is left to other devices: it lacks more than a type. XLA has all kernels in 16 bits.
    const bool lacks = says("not implemented for '");
    const bool in_16_bits = narrow && !called && (!lacks || says("'BFloat16'") || says("'Half'"));
    if (!in_16_bits && (lacks || (has_kernel && !backward))) {
      throw;
    }
  } catch (const c10::IndexError&) {
    if (!backward) {
      throw;  // zeros are indices wherever there is an element
    }
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
    if (backward) {
      if (says_any(text, {"Found dtype", "expected scalar type"})) {
        throw;
      }
      return;
    }
    // The kernel ran on zeros, which it may refuse as values.
    const bool out = std::find(info.is_out.begin(), info.is_out.end(), true) != info.is_out.end();
    if (empty || ((mixed || out) && says_any(text, {"type", "a long tensor", "must be long", "for result"})) ||
        (!narrow && says_any(text, {"support", "implemented", "handles only", "dtype", "Unknown", "can't be cast"})) ||
        (!masked(info, arguments) &&
         says_any(text, {"shape mismatch", "must match", "dimension", "same shape", "same size", "same number of"}))) {
      throw;
    }
  }
}

void raise_if_kernel_refuses_shapes(const OpInfo& info, Arguments arguments, Arguments results) {
  constexpr size_t kBytes = size_t{1} << 16;
  if (info.seeded || info.view || info.name.rfind("aten.", 0) != 0 ||
      info.name.find("_backward") != std::string::npos || masked(info, arguments) ||
      !info.op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {
    return;
  }
  size_t bytes = 0;
  bool plain = info.has_tensor;
  for (const auto& list : {arguments, results}) {
    for (const auto& v : list) {
      for_each_tensor(v, [&](const at::Tensor& t) { bytes += t.numel() * t.element_size(); });
    }
  }
  for (const auto& v : arguments) {
    for_each_tensor(v, [&](const at::Tensor& t) {
      plain = plain && (t.scalar_type() == at::kFloat || t.scalar_type() == at::kDouble);
    });
  }
  if (!plain || bytes > kBytes) {
    return;
  }
  try {
    raise_as_cpu(info, arguments);
  } catch (const c10::IndexError&) {
    throw;
  } catch (const c10::TypeError&) {
    throw;
  } catch (const c10::NotImplementedError& error) {
    // Of a type that the call asks for; what else a kernel lacks is left to other devices.
    const std::string text = error.what_without_backtrace();
    if (says_any(text, {"not implemented for '"}) && !says_any(text, {"'Half'", "'BFloat16'", "'UInt"})) {
      throw;
    }
  } catch (const c10::Error& error) {
    // The kernel ran on zeros, which it may refuse as values.
    if (says_any(error.what_without_backtrace(),
                 {"size", "shape", "dimension", "type", "support", "must be positive", "Unknown"})) {
      throw;
    }
  }
}

}  // namespace torch_xla
