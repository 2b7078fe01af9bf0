#include "record/unboxed.h"

#include <ATen/Operators.h>
#include <ATen/core/functional.h>
#include <torch/library.h>

#include <array>

#include "base/user_line.h"
#include "ir/op_info.h"
#include "record/record.h"

namespace torch_xla {

namespace {

using at::Tensor;
using c10::IValue;

// A boxed kernel gets copies of its arguments. The first copy of a tensor that only Python holds makes PyTorch take and
// give the GIL, to count a reference to the Python object, and so does the end of the last: a tenth of recording a sum.
IValue borrowed(const Tensor& t) {
  using Pointer = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  return IValue(Tensor(Pointer::reclaim(t.unsafeGetTensorImpl())));
}
IValue borrowed(const std::optional<Tensor>& t) { return t ? borrowed(*t) : IValue(); }
template <class T>
IValue borrowed(const T& value) {
  return IValue(value);
}

// TypedArguments of a call, of which the tensors are the caller's.
template <size_t N>
class TypedArguments {
 public:
  // One after the other, so that those that are there already are let go of where a later one throws.
  template <class... Args>
  void set(const Args&... args) {
    auto next = values_.begin();
    ((*next++ = borrowed(args)), ...);
  }
  ~TypedArguments() {
    for (auto& v : values_) {
      if (v.isTensor()) {
        std::move(v).toTensor().unsafeReleaseTensorImpl();
      }
    }
  }
  IValue* data() { return values_.data(); }

 private:
  std::array<IValue, N> values_;
};

template <class Op, class Schema>
struct Kernel;
template <class Op, class Result, class... Args>
struct Kernel<Op, Result(Args...)> {
  static Result call(Args... args) {
    static auto& info = op_info(Op::name, Op::overload_name);
    const FrameScope frame;
    const auto result_of = [&](auto&& results) -> Result {
      if constexpr (std::is_same_v<Result, Tensor&>) {
        return std::get<0>(std::tie(args...));  // it writes its first argument
      } else if constexpr (std::is_same_v<Result, Tensor>) {
        return std::move(results[0]);
      } else {
        return {std::move(results[0]), std::move(results[1]), std::move(results[2])};
      }
    };
    {
      TypedArguments<sizeof...(Args)> arguments;
      arguments.set(args...);
      if (auto fresh = record_cached(info, arguments.data())) {
        return result_of(*fresh);
      }
    }
    torch::jit::Stack stack{IValue(args)...};
    record_any(info, &stack);
    return result_of(c10::fmap(stack, [](const IValue& v) { return v.toTensor(); }));
  }
};

namespace ops = at::_ops;

// Calls `visit` with the name and the kernel of each.
template <class... Ops, class Visit>
void each(Visit visit) {
  const auto full = [](std::string name, const std::string& overload) {
    return overload.empty() ? name : name + '.' + overload;
  };
  (visit(full(Ops::name, Ops::overload_name), TORCH_FN((Kernel<Ops, typename Ops::schema>::call))), ...);
}

template <class Visit>
void each_kernel(Visit visit) {
  each<ops::add_Tensor, ops::sub_Tensor, ops::mul_Tensor, ops::div_Tensor, ops::pow_Tensor_Scalar, ops::neg, ops::exp,
       ops::log, ops::sqrt, ops::rsqrt, ops::reciprocal, ops::sin, ops::cos, ops::tanh, ops::erf, ops::sigmoid,
       ops::relu, ops::gelu, ops::silu, ops::clamp, ops::maximum, ops::minimum>(visit);
  each<ops::eq_Scalar, ops::eq_Tensor, ops::ne_Scalar, ops::ne_Tensor, ops::lt_Scalar, ops::lt_Tensor, ops::le_Scalar,
       ops::le_Tensor, ops::gt_Scalar, ops::gt_Tensor, ops::ge_Scalar, ops::ge_Tensor, ops::where_self,
       ops::masked_fill_Scalar>(visit);
  each<ops::add__Tensor, ops::sub__Tensor, ops::mul__Tensor, ops::div__Tensor, ops::addcmul_, ops::addcdiv_,
       ops::lerp__Scalar>(visit);
  each<ops::mm, ops::bmm, ops::addmm, ops::linear, ops::embedding, ops::gather, ops::_softmax, ops::_log_softmax,
       ops::native_layer_norm, ops::sum_dim_IntList, ops::mean, ops::mean_dim>(visit);
  each<ops::view, ops::_unsafe_view, ops::select_int, ops::slice_Tensor, ops::transpose_int, ops::t, ops::permute,
       ops::unsqueeze, ops::squeeze_dim, ops::expand>(visit);
}

}  // namespace

const std::unordered_set<std::string>& unboxed_kernels() {
  static const auto* const names = [] {
    auto* const all = new std::unordered_set<std::string>();
    each_kernel([&](std::string op, auto) { all->insert(std::move(op)); });
    return all;
  }();
  return *names;
}

TORCH_LIBRARY_IMPL(aten, XLA, m) {
  each_kernel([&](const std::string& op, auto kernel) { m.impl(op.c_str(), kernel); });
}

}  // namespace torch_xla
