"""Public names and their parameters against the stored list of torch_xla 2.9."""

import ast
import importlib
import inspect
import json
import pathlib

import pytest

import torch_xla

STORED = json.loads((pathlib.Path(__file__).parent / "signatures.json").read_text())
CASES = [(module, name) for module, names in STORED.items() for name in names]

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

# What scripts use besides functions and classes of the list, and besides the names of `symbols.json`.
NAMES = {
    "torch_xla": "experimental _XLAC core debug distributed utils amp _internal",
    "torch_xla.core.xla_model": "REDUCE_MUL REDUCE_AND REDUCE_OR REDUCE_MIN",
    "torch_xla.experimental": "is_eager_mode eager_mode_context",
    "torch_xla.experimental.eager": "eager_mode is_eager_mode eager_mode_context",
    "torch_xla.amp.autocast_mode": "autocast",
    "torch_xla.amp.syncfree": "SGD Adam",
    "torch_xla._XLAC": "_get_xla_tensor_debug_info _get_stablehlo _xla_step_marker _xla_real_devices",
}


def ours(module, name):
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


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


@pytest.mark.parametrize(("module", "name"), CASES, ids=[f"{module}.{name}" for module, name in CASES])
def test_parameters_and_defaults(module, name):
    expected = {
        key: DIFFERENT.get((module, name, key), value) for key, value in parameters(STORED[module][name]).items()
    }
    actual = {}
    prefixes = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    for parameter in inspect.signature(ours(module, name)).parameters.values():
        if parameter.name != "self":
            actual[prefixes.get(parameter.kind, "") + parameter.name] = default_of(parameter)
    assert list(actual.items()) == list(expected.items())


@pytest.mark.parametrize("module", NAMES)
def test_other_names_exist(module):
    found = importlib.import_module(module)
    missing = [name for name in NAMES[module].split() if not hasattr(found, name)]
    assert not missing


def test_star_import_gives_the_listed_names():
    scope = {}
    exec("from torch_xla import *", scope)
    assert {name for name in scope if not name.startswith("_")} == {n for n in torch_xla.__all__ if n[0] != "_"}


@pytest.mark.parametrize("module", STORED)
def test_public_functions_are_documented(module):
    for name in STORED[module]:
        if not name.split(".")[-1].startswith("_"):
            assert ours(module, name).__doc__, name
