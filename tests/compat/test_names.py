"""The names of torch_xla 2.9: their parameters, and what one process must get from those that are looked up.

`names.json` holds, by module, names that there must be; of some the original's parameters, and expressions that are
True, for one device too. `f` in one is what the name stands for, and `Scope` below says what the other words mean. An
expression after `!` asks for several processes or devices, which raises, one after `ValueError /text/` raises that.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import inspect
import io
import json
import os
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.tensor
import torch.nn as nn
from probes import python
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla import _notices
from torch_xla._core.report import hlo_proto
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel
from torch_xla.utils.utils import get_free_tcp_ports

HERE = Path(__file__).parent
TABLE = json.loads((HERE / "names.json").read_text())
TRUE, ALONE = "true", "true of one device"  # in a process of its own that has one device

# Where ours differs, it accepts every call that theirs accepts.
DIFFERENT = {
    # A default that is evaluated once at import, or could be changed by a caller, is None here and means the same.
    ("torch_xla.core.xla_model", "master_print", "fd"): "None",
    ("torch_xla.core.xla_model", "wait_device_ops", "devices"): "None",
    ("torch_xla.core.xla_model", "rendezvous", "replicas"): "None",
    # The same function under its public name.
    ("torch_xla.distributed.fsdp.utils", "apply_xla_patch_to_nn_linear", "patched_function"): (
        "xla_patched_nn_linear_forward"
    ),
}


def cases(key: str) -> list[Any]:
    """Module, name, and what the table says of it."""
    return [
        pytest.param(module, name, entry[key], id=f"{module}.{name}")
        for module, names in TABLE.items()
        for name, entry in names.items()
        if key in entry
    ]


def ours(module: str, name: str) -> Any:
    result: Any = importlib.import_module(module)
    for part in name.split("."):
        result = getattr(result, part)
    return result


def parameters(text):
    """Parameter name -> default, as source; an ellipsis where there is none."""
    args = ast.parse(f"def f{text}: pass").body[0].args
    names = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(names) - len(args.defaults)) + args.defaults
    pairs = [*zip(names, defaults, strict=True)]
    if args.vararg:
        pairs.append((args.vararg, None))
    pairs += zip(args.kwonlyargs, args.kw_defaults, strict=True)
    if args.kwarg:
        pairs.append((args.kwarg, None))
    stars = {args.vararg: "*", args.kwarg: "**"}
    return {
        stars.get(name, "") + name.arg: "..." if default is None else ast.unparse(default) for name, default in pairs
    }


def default_of(parameter):
    if parameter.default is inspect.Parameter.empty:
        return "..."
    if inspect.isfunction(parameter.default):
        return parameter.default.__name__
    return repr(parameter.default)


@pytest.mark.parametrize(("module", "name", "text"), cases("parameters"))
def test_parameters_and_defaults(module, name, text):
    expected = {key: DIFFERENT.get((module, name, key), value) for key, value in parameters(text).items()}
    actual = {}
    prefixes = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    for parameter in inspect.signature(ours(module, name)).parameters.values():
        if parameter.name != "self":
            actual[prefixes.get(parameter.kind, "") + parameter.name] = default_of(parameter)
    assert list(actual.items()) == list(expected.items())


@pytest.mark.parametrize("module", TABLE)
def test_names_are_there_and_public_functions_are_documented(module):
    for name, entry in TABLE[module].items():
        result = ours(module, name)
        if "parameters" in entry and not name.split(".")[-1].startswith("_"):
            assert result.__doc__, name


def test_star_import_gives_the_listed_names():
    scope = {}
    exec("from torch_xla import *", scope)
    assert {name for name in scope if not name.startswith("_")} == {n for n in torch_xla.__all__ if n[0] != "_"}


class Scope(dict):
    """The words of an expression, made when they are asked for."""

    def __missing__(self, name: str) -> Any:
        if not hasattr(Scope, f"_{name}"):
            raise KeyError(name)
        self[name] = getattr(self, f"_{name}")()
        return self[name]

    def _cpu(self) -> torch.Tensor:
        return torch.arange(6.0).view(2, 3)

    def _x(self) -> torch.Tensor:
        return self["cpu"].to("xla")

    def _w(self) -> torch.Tensor:
        return self["cpu"].to("xla").requires_grad_()

    def _model(self) -> nn.Module:
        """A layer on the device that has gradients; `expected` is what it gave for `cpu` on the host."""
        model = nn.Linear(3, 2)
        self["expected"] = model(self["cpu"]).detach()
        model.to("xla")
        model(self["x"]).sum().backward()
        return model

    def _optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self["model"].parameters(), lr=0.1)

    def _fsdp(self) -> nn.Module:
        return XlaFullyShardedDataParallel(self["model"])

    def _gradient(self) -> Callable[[], torch.Tensor]:
        before = self["model"].weight.grad.cpu()
        return lambda: before

    def _stepped(self) -> Callable[[Callable[[], Any]], bool]:
        """Whether a call changes the layer's weight."""

        def stepped(call: Callable[[], Any]) -> bool:
            before = self["model"].weight.detach().cpu()
            call()
            return not torch.equal(self["model"].weight.cpu(), before)

        return stepped

    def _q(self) -> torch.Tensor:
        self["query"] = torch.randn(1, 2, 4, 8)
        return self["query"].to("xla")

    def _attention(self) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(*[self["query"]] * 3, is_causal=True, scale=1.0)

    def _text(self) -> io.StringIO:
        return io.StringIO()

    def _port(self) -> int:
        return get_free_tcp_ports()[0]

    def _mesh(self) -> xs.Mesh:
        return xs.Mesh([0], (1, 1), ("fsdp", "tensor"))

    def _tpu(self) -> AbstractContextManager[Any]:
        """An environment as on a TPU machine."""
        return mock.patch.dict(os.environ, {"TPU_ACCELERATOR_TYPE": "v4-16"})

    def _device_mesh(self) -> Any:
        """As much of PyTorch's `DeviceMesh` as is asked of it without a process group."""
        return type("Mesh", (), {"device_type": "xla", "ndim": 0, "mesh": torch.arange(1), "mesh_dim_names": ("a",)})()

    def _process_mesh(self) -> DeviceMesh:
        importlib.import_module("torch_xla.distributed.xla_backend")
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", init_method="xla://")
        return init_device_mesh("xla", (1,))

    def _named(self) -> list[str]:
        return []


def inside(context: AbstractContextManager[Any], call: Callable[[], Any]) -> Any:
    with context:
        return call()


def drawn(seed: Callable[[], Any]) -> list[float]:
    seed()
    return torch.rand(4, device="xla").tolist()


def called(run: Callable[[Callable[[Any], None]], Any]) -> list[Any]:
    """What a function was called with."""
    seen: list[Any] = []
    run(seen.append)
    return seen


def grew(read: Callable[[], int], call: Callable[[], Any]) -> bool:
    before = read()
    call()
    return read() > before


def older(call: Callable[[], Any]) -> Any:
    """The result of an older name, which warns at its first call only."""
    _notices.forget("deprecated")
    with pytest.warns(DeprecationWarning, match=r"^\[deprecated\] .* is an older name; use ") as told:
        result = call()
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call() == result
    return result


def count(name: str) -> int:
    return met.counter_value(name) or 0


REDUCTIONS = (xm.REDUCE_SUM, xm.REDUCE_MUL, xm.REDUCE_MIN, xm.REDUCE_MAX, xm.REDUCE_AND, xm.REDUCE_OR)
WORDS = {
    "torch": torch, "nn": nn, "os": os, "contextlib": contextlib, "mock": mock, "torch_xla": torch_xla, "xm": xm,
    "xr": xr, "xs": xs, "hlo_proto": hlo_proto, "inside": inside, "drawn": drawn, "called": called, "grew": grew,
    "older": older, "count": count, "REDUCTIONS": REDUCTIONS,
}  # fmt: skip


def check(module: str, name: str, texts: list[str], path: str) -> None:
    for text in texts:
        scope = Scope(WORDS, f=ours(module, name), path=path)
        raised = re.fullmatch(r"(\w+Error) /(.*)/ (.*)|! (.*)", text)
        if raised is None:
            assert eval(text, scope) is True, text
        elif raised[4]:
            with pytest.raises(NotImplementedError, match=r"^\[[a-z_ ]+\] .*(; |, expected )"):
                eval(raised[4], scope)
        else:
            with pytest.raises(getattr(builtins, raised[1]), match=raised[2]):
                eval(raised[3], scope)


@pytest.mark.parametrize(("module", "name", "texts"), cases(TRUE))
@pytest.mark.compiled("counters of programs are among what it asks for")
def test_one_process_gets_what_it_asks_for(module: str, name: str, texts: list[str], tmp_path: Path) -> None:
    check(module, name, texts, str(tmp_path / "file"))


@pytest.mark.costs("some hundred names are called")
def test_what_one_device_can_do(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import test_names as tests
for case in tests.cases(tests.ALONE):
    tests.check(*case.values, sys.argv[1])
"""
    python("-c", program, tmp_path / "file", devices=1, timeout=200, imported=True)


def test_unknown_private_names_say_what_to_use() -> None:
    with pytest.raises(AttributeError, match="_xla_no_such_name.*use the public functions"):
        torch_xla._XLAC._xla_no_such_name  # noqa: B018
    assert not hasattr(torch_xla._XLAC, "_xla_no_such_name")
