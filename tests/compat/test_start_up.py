"""What a fresh process imports for a program, and that the stand-ins answer as what they stand for."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from probes import python
from torch.fx.experimental import symbolic_shapes

from torch_xla._core.torch import import_stubs

_STEPS = """
import json, sys
import torch, torch_xla
import torch_xla.core.xla_model as xm
from torch import nn

cnn = nn.Sequential(
    nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(), nn.Flatten(), nn.Linear(18, 4)
)
models = [
    (nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 4)), torch.arange(6)),
    (cnn, torch.rand(6, 1, 8, 8)),
    (nn.TransformerEncoderLayer(4, 2, 8, activation="gelu", batch_first=True), torch.rand(6, 3, 4)),
]
computed = []
for model, data in models:
    model = model.to("xla")
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.zero_grad()
    scores = model(data.to("xla")).flatten(1)
    loss = nn.functional.cross_entropy(scores, torch.arange(6, device="xla") % 4)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    computed += [loss.detach(), *model.parameters()]
rules = "torch_xla.ops.matmul" in sys.modules  # recording alone needs none
assert "stablehlo" in xm.get_stablehlo(computed)
print(rules)
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.costs("a process that imports all anew")
def test_training_steps_import_no_compiler() -> None:
    """Recorded and lowered: PyTorch's shape functions, decompositions and optimizers ask for none of these."""
    *_, rules, modules = python("-c", _STEPS).stdout.splitlines()
    imported = set(json.loads(modules))
    assert rules == "False" and "torch_xla.ops.matmul" in imported
    unused = {"sympy", "torch._dynamo", "torch.onnx", "torch._inductor", "torch.distributed.tensor"}
    assert not unused & imported
    assert "torch.fx.experimental.symbolic_shapes" not in imported


_COMPILED = """
import sys
import torch, torch_xla

traced = []

@torch._disable_dynamo
def unseen(x):
    traced.append(torch.compiler.is_compiling())
    return x * 2

scope = {"__name__": "torch.somewhere"}
exec('''
def known():
    import sympy
    import torch._dynamo
    from torch.fx.experimental.symbolic_shapes import guard_or_false
    return sympy.Basic, torch._dynamo.disable, guard_or_false
def more():
    import sympy
    from torch.fx.experimental.symbolic_shapes import ShapeEnv, guard_or_false
    from torch._dynamo.utils import counters
    from sympy.core.symbol import Symbol
    return sympy.Symbol is Symbol, ShapeEnv.__module__
''', scope)

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
optimizer.zero_grad()
optimizer.step()
unseen(torch.ones(2))
with torch.device("meta"):
    assert torch._disable_dynamo(lambda: torch.ones(2))().device.type == "meta"
torch._check(True)
scope["known"]()
assert not {"torch._dynamo", "sympy"} & set(sys.modules)

assert scope["more"]() == (True, "torch.fx.experimental.symbolic_shapes")
import sympy
import torch._dynamo
from torch.fx.experimental.symbolic_shapes import guard_or_false

assert scope["known"]() == (sympy.Basic, torch._dynamo.disable, guard_or_false)
assert sympy.Basic.__module__ == "sympy.core.basic" and torch._dynamo.disable.__module__ == "torch._dynamo.decorators"

graphs = []

def backend(module, _inputs):
    graphs.append([str(node.target) for node in module.graph.nodes if node.op.startswith("call")])
    return module

x = torch.rand(3, 5)
torch.testing.assert_close(torch.compile(lambda x: unseen(x.sin()).cos(), backend=backend)(x), (x.sin() * 2).cos())
assert graphs == [["sin"], ["cos"]] and not any(traced), (graphs, traced)
optimizer.step()
"""


_DECORATED = """
import sys
import torch, torch_xla

@torch.compiler.disable()
def known(x):
    return torch.compiler.is_compiling()

@torch.compiler.disable(recursive=False)
def partly(x):
    return torch.compiler.is_compiling()

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.compiler.is_compiling()

x = torch.ones(2)
for call in (known, partly, torch.compiler.disable(Model())):
    assert not call(x) and not torch.compile(lambda x: call(x), backend="eager")(x)
assert isinstance(torch.compiler.disable(Model()), torch.nn.Module)
"""


@pytest.mark.costs("it imports PyTorch's compiler")
def test_functions_are_kept_from_the_compiler_in_each_form_of_the_decorator() -> None:
    """With options only, or of a module, which it is the compiler's to wrap."""
    python("-c", _DECORATED, imported=True)


@pytest.mark.costs("it imports PyTorch's compiler")
def test_who_wants_more_than_a_stand_in_gets_the_module() -> None:
    """A name that it lacks, or a part of the module; what ran untraced before stays untraced."""
    python("-c", _COMPILED, imported=True)


_OF_ITSELF = """
import sys
import torch, torch_xla

stand_in = torch._dynamo
assert "torch._dynamo" not in sys.modules
for name in ("__file__", "__path__", "__spec__", "__loader__", "__package__"):
    said = getattr(stand_in, name)
    assert said is getattr(sys.modules["torch._dynamo"], name), name
assert not hasattr(stand_in, "__version__")
"""


@pytest.mark.costs("it imports PyTorch's compiler")
def test_what_a_module_says_of_itself_is_that_of_the_module() -> None:
    python("-c", _OF_ITSELF, imported=True)


_RELOADED = """
import importlib, sys
import torch, torch_xla

first = torch._dynamo
importlib.reload(torch._dynamo)
assert first is torch._dynamo is sys.modules["torch._dynamo"] and type(first) is type(sys)
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
"""

_FAILED_IMPORT = """
import sys
import torch, torch_xla

sys.modules["torch._dynamo.config"] = None  # it cannot be imported
try:
    torch._dynamo.explain
except ImportError:
    pass
else:
    raise AssertionError
parameter = torch.nn.Parameter(torch.ones(1))
parameter.grad = torch.ones(1)
torch.optim.SGD([parameter], lr=1.0).step()
assert parameter.item() == 0 and "torch._dynamo" not in sys.modules
del sys.modules["torch._dynamo.config"]
import torch._dynamo.config
assert torch._dynamo.explain
"""


@pytest.mark.parametrize("code", [_RELOADED, _FAILED_IMPORT])
def test_a_module_is_loaded_into_its_stand_in(code: str) -> None:
    python("-c", code)


def _outcome(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        result = function(*args)
    except Exception as error:
        return type(error), str(error)
    return type(result), result


_VALUES = (True, False, 0, 1, 3, 2.5, None, "a", (2, 3), [2, 3], [2, (3, 4)], (2, [3, 4]), (), torch.Size((2, 3)))


@pytest.mark.parametrize("name", import_stubs._PLAIN)
def test_a_stand_in_says_what_the_function_says(name: str) -> None:
    """For good arguments and bad ones."""
    function = import_stubs._of_plain(name, *import_stubs._PLAIN[name])
    original = getattr(symbolic_shapes, name)
    calls = list(itertools.product(_VALUES, repeat=2 if name in ("sym_and", "sym_or", "sym_eq") else 1))
    for args in calls:
        if name == "free_unbacked_symbols" and _outcome(original, args)[0] is not AssertionError:
            assert not function(*args) and not original(*args)
        else:
            assert _outcome(function, args) == _outcome(original, args), args
