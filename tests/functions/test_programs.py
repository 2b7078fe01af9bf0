"""Functions written in JAX, or of `xla_builder.Op` values, in the middle of a recorded graph."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_op_registry as xor
from torch_xla import _bindings

X = torch.arange(6.0).reshape(2, 3)


def test_a_jax_function_is_one_operator(compiles) -> None:
    def function(a: Any, b: Any, *, factor: int = 2) -> dict[str, Any]:
        return {"sum": jnp.sin(a["x"]) * factor + b, "half": b.astype(jnp.bfloat16)}

    x = X.to("xla")
    torch_xla.sync()
    with compiles(1):
        for _ in range(3):
            result = xb.call_jax(function, ({"x": x + 1}, x), {"factor": 3})
            doubled = result["sum"] * 2
            torch_xla.sync()
    torch.testing.assert_close(doubled.cpu(), ((X + 1).sin() * 3 + X) * 2)
    assert result["half"].dtype == torch.bfloat16


def test_equal_programs_share_an_executable(compiles) -> None:
    x = X.to("xla")
    torch_xla.sync()
    with compiles(2):
        for factor in (2.0, 2.0, 3.0):
            y = xb.call_jax(lambda a, factor=factor: a * factor, (x,))
            torch_xla.sync()
            assert torch.equal(y.cpu(), X * factor)


def test_a_function_is_traced_once_per_signature() -> None:
    import jax

    x = X.long().to("xla")
    traced = []

    def function(a: Any, number: float) -> Any:
        traced.append(number)
        return a * number

    for number in (1, 1.0, True, 1):
        expected = X.long() * number
        result = xb.call_jax(function, (x, number)).cpu()
        assert torch.equal(result.to(expected.dtype), expected)
        assert result.is_floating_point() == expected.is_floating_point()
    assert list(map(type, traced)) == [int, float, bool]
    known = xb._jax_to_xla_computation_cache_elements()
    for precision in ("highest", "default", "highest"):
        with jax.default_matmul_precision(precision):
            y = xb.call_jax(jnp.matmul, (X.to("xla"), X.T.to("xla")))
        assert torch.equal(y.cpu(), X @ X.T)
    assert xb._jax_to_xla_computation_cache_elements() == known + 2


def test_captured_arrays_are_part_of_the_program() -> None:
    x = X.to("xla")
    results = [xb.call_jax(functools.partial(jnp.add, jnp.full(3, c)), (x,)) for c in (1.0, 2.0)]
    assert [float(r.cpu()[0, 0]) for r in results] == [1.0, 2.0]


def test_arrays_of_jitted_functions_are_part_of_the_program() -> None:
    """The text of both is the same."""

    def model(weight: float) -> Any:
        w = jnp.full((3, 4), weight)
        return jax.jit(lambda a: a @ w)

    x = X.to("xla")
    results = [xb.call_jax(model(weight), (x,)).cpu() for weight in (1.0, 2.0)]
    torch.testing.assert_close(results, [X @ torch.full((3, 4), weight) for weight in (1.0, 2.0)])


def test_functions_called_on_the_host_are_part_of_the_program() -> None:
    def function(factor: int) -> Any:
        shape = jax.ShapeDtypeStruct((2, 3), jnp.float32)
        return lambda a: jax.pure_callback(lambda v: v * factor, shape, a)

    x = X.to("xla")
    for factor in (2, 3):
        torch.testing.assert_close(xb.call_jax(function(factor), (x,)).cpu(), X * factor)


def test_kernels_are_part_of_the_program() -> None:
    from jax.experimental import pallas

    def kernel(factor: int) -> Any:
        def body(given: Any, out: Any) -> None:
            out[...] = given[...] * factor

        return pallas.pallas_call(body, jax.ShapeDtypeStruct((2, 3), jnp.float32), interpret=True)

    x = X.to("xla")
    for factor in (2, 3):
        torch.testing.assert_close(xb.call_jax(kernel(factor), (x,)).cpu(), X * factor)


def test_the_sign_of_zero_makes_another_program() -> None:
    x = X.to("xla")
    operator = xor.register("divide", lambda a, by: a / a.scalar_like(by))
    for zero in (0.0, -0.0):
        expected = X / zero
        for actual in (xb.call_jax(lambda a, by: a / jnp.full_like(a, by), (x, zero)), operator(x, by=zero)):
            torch.testing.assert_close(actual.cpu(), expected, equal_nan=True)


def test_types_and_errors_of_jax_functions() -> None:
    x = X.to("xla").double()
    y = xb.call_jax(lambda a, dtype: a.astype(dtype), (x, torch.int64))
    assert y.dtype == torch.int64
    assert xb.call_jax(lambda a: a + jnp.ones(3), (X.to("xla"),)).dtype == torch.float32
    with pytest.raises(ValueError, match="Incompatible shapes"):
        xb.call_jax(lambda a: a + jnp.ones(4), (x,))


def test_an_operator_of_ops() -> None:
    def function(a: xb.Op, b: xb.Op, start: int = 0) -> xb.Op:
        part = a.slice_in_dim(start_index=start, limit_index=start + 1, dimno=0)
        return xb.Op.tuple((part + b.slice_in_dim(0, 1, 0), a.cast(xb.Type.BF16)))

    operator = xor.register("slice_and_add", function)
    x = X.to("xla")
    total, half = operator(x, x, start=1)
    assert torch.equal(total.cpu(), X[1:] + X[:1])
    assert torch.equal(operator(x, x, start=0)[0].cpu(), X[:1] * 2)
    assert half.dtype == torch.bfloat16


def test_loops_and_branches_of_ops() -> None:
    def loop(a: xb.Op, b: xb.Op, limit: int) -> xb.Op:
        def number(value: int) -> xb.Op:
            return xb.Op.scalar(a.builder(), value, dtype=xb.Type.S32)

        result = xb.Op.mkwhile(
            (number(0), a, b),
            lambda i, a, b: i < number(limit),
            lambda i, a, b: xb.Op.tuple((i + number(1), a + b, b)),
        )
        return result.get_tuple_element(1)

    def branch(k: xb.Op, a: xb.Op) -> xb.Op:
        zero = xb.Op.zero(k.builder(), dtype=k.shape().dtype)
        return (k > zero).mkconditional((a,), lambda a: a + a, lambda a: a - a)

    x = X.to("xla")
    assert torch.equal(xor.register("loop", loop)(x, x, limit=4).cpu(), X * 5)
    for sign in (1.0, -1.0):
        chosen = xor.register("branch", branch)(torch.tensor(sign).to("xla"), x)
        assert torch.equal(chosen.cpu(), X * 2 if sign > 0 else X * 0)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda a: a.reduce_all(xb.Op.zero(None), lambda p, q: p + q), X.sum()),
        (lambda a: a.transpose((1, 0)).rev((0,)).reshape((6,)), X.T.flip(0).reshape(6)),
        (lambda a: xb.Op.concat_in_dim((a, a.tanh()), 1), torch.cat((X, X.tanh()), 1)),
        (lambda a: a.pad(xb.Op.one(None), ((0, 0, 0), (1, 0, 0))), torch.nn.functional.pad(X, (1, 0), value=1.0)),
        (lambda a: (a >= a.ones_like()).select(a, a.zeros_like()), X),
        (lambda a: a @ a.transpose((1, 0)), X @ X.T),
        (lambda a: xb.Op.sort((-a,), None, 1), (-X).sort(1).values),
        (
            lambda a: a.reshape((1, 1, 2, 3)).conv(xb.Op.constant(None, torch.ones(1, 1, 2, 2)), (1, 1)),
            torch.nn.functional.conv2d(X[None, None], torch.ones(1, 1, 2, 2)),
        ),
    ],
)
def test_operations(function: Any, expected: torch.Tensor) -> None:
    result = xor.register("operation", function)(X.to("xla"))
    torch.testing.assert_close(result.cpu(), expected)


def test_types_have_names_both_ways() -> None:
    for name in vars(xb.Type).values():
        if isinstance(name, str) and name in xb._XLA_PT_TYPE_MAP:
            assert xb.Op.from_torch_type(xb.Op.to_torch_type(name)) == name
    assert "add" in xb.get_computation_hlo(xb.create_computation("f", lambda a: a + a, [xb.mkshape("f32", (2,))]))


def test_tensors_elsewhere_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"\[tensor\] got a tensor on cpu"):
        _bindings.buffer_of(X)
    with pytest.raises(RuntimeError, match=r"\[graph\] got a tensor on cpu"):
        _bindings.Cut.of_tensors([X], _bindings.Cut.Scope.LIVE).graph()


def test_the_users_jax_is_not_changed() -> None:
    xb.call_jax(lambda a: a * 2, (X.to("xla"),))
    assert jax.numpy.ones(2).dtype == jnp.float32 and not jax.config.jax_enable_x64


def test_arrays_beside_tensors_reach_it_as_jax_would_take_them() -> None:
    x = X.to("xla")
    for factor in (np.full(3, 2.0), np.arange(3), jnp.full(3, 2.0, jnp.bfloat16), jnp.arange(3)):
        for sign in (1, -1):  # arrays of one type are inputs of one program
            expected = np.array(jnp.multiply(X.numpy(), factor * sign))
            result = xb.call_jax(jnp.multiply, (x, factor * sign)).cpu()
            assert result.dtype == torch.from_numpy(expected).dtype
            assert result.tolist() == expected.tolist()
    assert xb.call_jax(jnp.sum, (np.arange(4.0),)).item() == 6
