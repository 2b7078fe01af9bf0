"""What a recorded call becomes: nodes, keys, numbers, shapes, errors. Nothing here needs a device."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from agreement import refused_alike
from oracle import assert_same, cut, value
from probes import here

import torch_xla  # noqa: F401
from torch_xla import _bindings
from torch_xla._torch_internals import decomposition_table
from torch_xla.ops import call, undecomposed
from torch_xla.ops.registry import rule_for


def arange(n: int = 6, **kwargs: object) -> torch.Tensor:
    return torch.arange(n, device="xla", **kwargs)  # type: ignore[call-overload]


def ops(tensor: torch.Tensor) -> list[str]:
    return [node.op for node in cut(tensor).nodes]


def key(tensor: torch.Tensor) -> str:
    return cut(tensor).key


def test_one_node_per_call_in_functional_form() -> None:
    x = arange() * 1.0
    x.add_(2.5)
    torch.mul(x, x, out=x)
    x.relu_()
    assert ops(x)[-3:] == ["aten.add.Tensor", "aten.mul.Tensor", "aten.relu.default"]


def test_equal_programs_have_equal_keys() -> None:
    def program(n: int, factor: float) -> torch.Tensor:
        return (arange(n) * factor).sum()

    assert key(program(6, 2.5)) == key(program(6, 2.5))
    assert key(program(6, 2.5)) == key(program(6, 7.5)), "a number is an input of the program"
    assert key(program(6, 2.5)) != key(program(7, 2.5)), "a shape is not"
    assert key(program(6, 2)) != key(program(6, 2.5)), "nor is the type of a number"


def test_wiring_is_part_of_the_key() -> None:
    x = arange()
    y = arange() + 2
    assert key(x - y) != key(y - x)


def test_zero_and_one_as_integers_are_constants() -> None:
    x = arange()
    assert key(x + 1) != key(x + 2)
    assert key(x + 2) == key(x + 3)
    _bindings.set_special_numbers(False)
    try:
        assert key(x + 1) == key(x + 2)
    finally:
        _bindings.set_special_numbers(True)


def test_exponents_are_constants() -> None:
    x = arange()
    assert key(x**2) != key(x**3)


def test_all_scalars_of_operators_without_a_rule_are_constants() -> None:
    call.load_rules()
    without = [op for op in decomposition_table if op.namespace == "aten" and rule_for(str(op)) is None]
    schemas = {str(op): str(op._schema) for op in without if not op._schema.is_mutable and "where" not in str(op)}
    apart = [name for name, text in schemas.items() if re.search(r"[( ]Scalar\?? ", text) and "Tensor " in text]
    names = sorted(name.removeprefix("aten.").removesuffix(".default") for name in apart)
    assert names == undecomposed.DECOMPOSED  # `where` of numbers is never recorded


def test_shapes_are_inferred_once_per_signature() -> None:
    x = arange() * 1.0
    torch.sin(x + 3.0)
    before = _bindings.shape_cache_misses()
    for factor in (4.0, 5.0, 6.0):
        torch.sin(x + factor)
    assert _bindings.shape_cache_misses() == before


def test_a_clone_and_a_same_type_copy_are_no_nodes() -> None:
    x = arange()
    y = torch.empty_like(x)
    y.copy_(x)
    assert ops(x.clone()) == ops(y) == ["aten.arange.start_step"]


def test_a_fill_replaces_the_value() -> None:
    x = arange() * 2
    x.fill_(3)
    assert ops(x) == ["aten.full.default"]
    assert value(x).tolist() == [3] * 6


def test_strides_are_those_of_eager() -> None:
    x = arange(24).reshape(2, 3, 4)
    y = torch.arange(24).reshape(2, 3, 4)
    assert_same(x.permute(2, 0, 1) + 1, y.permute(2, 0, 1) + 1)
    assert_same(x.transpose(0, 2)[1:], y.transpose(0, 2)[1:])


@pytest.mark.parametrize(
    "mistake",
    [
        lambda d: torch.mm(torch.ones(2, 3, device=d), torch.ones(2, 3, device=d)),
        lambda d: torch.ones(2, device=d) + torch.ones(3, device=d),
        lambda d: torch.ones(4, 4, device=d).transpose(0, 1).view(-1),
        lambda d: torch.ones(3, dtype=torch.int64, device=d).add_(1.5),
        lambda d: torch.ones(3, device=d).expand(2, 3).add_(1),
        lambda d: torch.ones(3, device=d)[5],
        lambda d: torch.ones(3, device=d).reshape(2, 2),
        lambda d: torch.cat([torch.ones(2, 2, device=d), torch.ones(3, 3, device=d)]),
        lambda d: torch.ones(2, 2, device=d).sum(5),
        lambda d: torch.nn.functional.linear(torch.ones(2, 3, device=d), torch.ones(4, 5, device=d)),
        lambda d: torch.nn.functional.conv2d(torch.ones(1, 3, 4, 4, device=d), torch.ones(2, 4, 3, 3, device=d)),
        lambda d: torch.ones(2, device=d).copy_(torch.ones(3, device=d)),
        lambda d: torch.ones(2, 3, device=d).as_strided((9,), (1,)),
        lambda d: torch.empty(-1, device=d),
    ],
)
def test_a_mistake_raises_at_its_line_as_on_cpu(mistake: Callable[[str], torch.Tensor]) -> None:
    refused_alike(mistake, first_line=True)


def test_mixing_devices_gives_pytorchs_message() -> None:
    x = arange() * 1.0
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device.*xla:0 and cpu"):
        x + torch.ones(6)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device.*xla:0 and xla:1"):
        x + torch.arange(6.0, device="xla:1")


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match=r"\[device\] got xla:9, available are xla:0 to xla:"):
        torch.empty(2, device="xla:9")


def test_frames_name_the_users_line() -> None:
    x = arange() + 1
    line = here(-1)
    assert cut(x).nodes[-1].frame == line


def test_a_backward_pass_runs_where_it_is_called_and_has_its_line() -> None:
    def where(parallel: bool | None) -> tuple[bool, bool]:
        threads = []
        x = torch.ones(3, device="xla", requires_grad=True)
        y = x * x
        y.register_hook(lambda _: threads.append(threading.get_ident()))
        if parallel is not None:
            torch.autograd.set_multithreading_enabled(parallel)
        line = here(1)
        y.sum().backward()
        frame = cut(x.grad).nodes[-1].frame
        assert frame in (line, None) and value(x.grad).tolist() == [2.0] * 3
        return threads == [threading.get_ident()], frame == line

    def everywhere() -> None:
        results.append(where(None))
        results.append(where(True))  # the user's word stands, whatever is recorded after it
        results.append(where(None))

    results: list[tuple[bool, bool]] = []
    thread = threading.Thread(target=everywhere)  # what it sets does not reach other tests
    thread.start()
    thread.join()
    assert results == [(True, True), (False, False), (False, False)]


def test_stacks_where_they_are_kept() -> None:
    def inner() -> torch.Tensor:
        return arange() + 1

    _bindings.set_frame_depth(8)
    try:
        x = inner()
        line = here(-1)
    finally:
        _bindings.set_frame_depth(1)
    frame = cut(x).nodes[-1].frame
    assert frame is not None
    assert re.match(r".*:\d+ in inner < .*", frame)
    assert f" < {line}" in frame


def test_no_frames_where_they_are_off() -> None:
    _bindings.set_frame_depth(0)
    try:
        x = arange() + 1
    finally:
        _bindings.set_frame_depth(1)
    assert cut(x).nodes[-1].frame is None


@pytest.mark.usefixtures("no_auto_barrier")
def test_more_nodes_than_a_stack_has_room_for_are_traversed_and_released() -> None:
    x = arange() * 1.0
    for _ in range(300_000):  # of 8 MB that is 28 bytes for each
        x = x + 1.0
    assert _bindings.Cut.of_tensors([x]).preview().num_nodes == 300_002
    del x


@pytest.mark.parametrize(
    "op", [lambda x: x.roll(1), lambda x: x.flip(0), lambda x: x.roll((1, 2), (0, 0)), torch.cumsum]
)
def test_zero_size_tensors(op: object) -> None:
    call = (lambda x: op(x, 0)) if op is torch.cumsum else op  # type: ignore[operator]
    assert_same(call(arange(0) * 1.0), call(torch.arange(0) * 1.0))  # type: ignore[operator]


@pytest.mark.own_client("an operator of the host is not recorded")
def test_the_functional_form_of_an_operator_may_come_later() -> None:
    x = arange() * 1.0
    x.add_(1.0)
    with torch.library._scoped_library("late", "DEF") as library:

        def define(name: str, schema: str, kernel: Callable[[torch.Tensor], torch.Tensor]) -> None:
            library.define(name + schema)
            library.impl(name, kernel, "CPU")
            library.impl(name, kernel, "Meta")

        def last() -> str:
            x = arange() * 1.0
            torch.ops.late.double_(x)
            assert value(x).tolist() == [0, 2, 4, 6, 8, 10]
            return ops(x)[-1]

        define("double_", "(Tensor(a!) x) -> Tensor(a!)", lambda x: x.mul_(2))
        assert last() == "late.double_.default"
        define("double", "(Tensor x) -> Tensor", lambda x: x * 2)
        assert last() == "late.double.default"
    with torch.library._scoped_library("late", "DEF") as library:  # both are taken back, and come again
        define("double", "(Tensor x) -> Tensor", lambda x: x * 2)
        define("double_", "(Tensor(a!) x) -> Tensor(a!)", lambda x: x.mul_(2))
        assert last() == "late.double.default"


MASK = torch.tensor([[True, False, True, True]]).expand(3, 4)
EXPANDED: dict[str, Callable[[torch.Tensor], object]] = {
    "masked_fill_": lambda x: x.masked_fill_(MASK.to(x.device), 1.0),
    "index_fill_": lambda x: x.index_fill_(1, torch.tensor([0], device=x.device), 1.0),
    "index_put_": lambda x: x.index_put_((torch.tensor([0], device=x.device),), x.new_ones(())),
    "set by a mask": lambda x: x.__setitem__(MASK.to(x.device), 1.0),
}


@pytest.mark.parametrize("name", EXPANDED)
def test_a_write_to_an_expanded_tensor_warns_each_time_as_on_the_cpu(name: str) -> None:
    def warned(device: str) -> set[str]:
        with warnings.catch_warnings(record=True) as result:
            warnings.simplefilter("always")
            EXPANDED[name](torch.zeros(3, 1, device=device).expand(3, 4))
        return {str(warning.message) for warning in result}

    expected = warned("cpu")
    assert expected and warned("xla") == warned("xla") == expected
