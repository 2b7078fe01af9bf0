"""Each module of `torch.nn`, forward and gradients, in float32 and in the types of 16 bits, beside the CPU."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import rotation
import torch
from torch import nn
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db
from torch.utils._pytree import tree_leaves, tree_map_only

import torch_xla

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # what PyTorch says of these inputs

INPUTS = 2  # of each module and type
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
Values = list[torch.Tensor | None]
DRAWS = ("Dropout", "Lazy", "RReLU")  # each device has its own random numbers
MIXING = (torch.nn.LayerNorm(8), torch.nn.RMSNorm(8), torch.nn.GroupNorm(2, 6), torch.nn.BatchNorm1d(6))


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def results(module: torch.nn.Module, arguments: Any, device: str) -> Values:
    """What a module gives, and the gradients by its arguments and parameters of the sum of all that."""
    module = copy.deepcopy(module).to(device)

    def moved(t: torch.Tensor) -> torch.Tensor:
        return t.detach().to(device, copy=True).requires_grad_(t.requires_grad)

    args, kwargs = tree_map_only(torch.Tensor, moved, arguments)
    outs = tensors(module(*args, **kwargs))
    sums = [out.float().sum() for out in outs if out.requires_grad]
    leaves = [t for t in (*tensors((args, kwargs)), *module.parameters()) if t.requires_grad]
    grads = torch.autograd.grad(sums, leaves, allow_unused=True) if sums and leaves else ()
    return [*(out.detach() for out in outs), *grads]


def widened(value: Any, dtype: torch.dtype) -> Any:
    def wide(t: torch.Tensor) -> torch.Tensor:
        return t.detach().float().requires_grad_(t.requires_grad) if t.dtype == dtype else t

    return tree_map_only(torch.Tensor, wide, value)


def expect_close(got: Values, own: Values, wide: Values, dtype: torch.dtype) -> None:
    """Compares with what the CPU computes in float32.

    In 16 bits the CPU rounds between operators and adds up in them, so it may itself be further off.
    """
    for ours, theirs, exact in zip(got, own, wide, strict=True):
        assert (ours is None) == (theirs is None) and (ours is None) == (exact is None)
        if ours is None or theirs is None or exact is None or not exact.numel():
            continue
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        rtol = atol = 0.0
        if exact.is_floating_point():
            rtol = TOLERANCE[dtype]
            atol = rtol * max(1.0, largest(exact)) + largest(theirs - exact)
        torch.testing.assert_close(ours.cpu().to(exact.dtype), exact, rtol=rtol, atol=atol, equal_nan=True)


def largest(t: torch.Tensor) -> float:
    finite = t[t.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0


def inputs(info: ModuleInfo, dtype: torch.dtype, training: bool) -> list[ModuleInput]:
    result = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    return [i for i in itertools.islice(result, INPUTS) if i.forward_input is not None]


def cases() -> Iterator[Any]:
    """Each module and type. All are tested in float32, some in one of 16 bits too; the rest is left to the sweep.

    Those that find their shapes out at the first call are the others from then on: it comes to one of four.
    """
    for info in module_db:
        module = info.name.removeprefix("nn.")
        taken = {torch.float32} if "Lazy" not in module or rotation.is_next(module, 4) else set()
        if rotation.is_next(f"{module} in 16 bits", 4) and taken:
            taken.add(rotation.pick(module, (torch.bfloat16, torch.float16)))
        for dtype in TOLERANCE:
            marks = [] if dtype in taken else [pytest.mark.sweep]
            yield pytest.param(info, dtype, marks=marks, id=f"{module}-{str(dtype).removeprefix('torch.')}")


@pytest.mark.parametrize(("info", "dtype"), list(cases()))
def test_module(info, dtype):
    checked = []
    for training in (True, False) if info.train_and_eval_differ else (True,):
        for given in inputs(info, dtype, training):
            torch.manual_seed(0)
            module = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs)
            module = module.to(dtype).train(training)
            arguments = given.forward_input.args, given.forward_input.kwargs
            try:
                own = results(module, arguments, "cpu")
            except RuntimeError:
                continue  # the CPU does not take these types
            torch.manual_seed(0)
            got = results(module, arguments, "xla")
            checked.append((got, own, results(module.float(), widened(arguments, dtype), "cpu"), dtype))
    torch_xla.sync()
    for compared in checked:
        if not any(name in info.name for name in DRAWS):
            expect_close(*compared)
    if not checked:
        assert dtype != torch.float32
        pytest.skip("the CPU does not take this type")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("module", MIXING, ids=lambda module: type(module).__name__)
def test_float32_parameters_beside_16_bits(module, dtype):
    x = torch.randn(4, 6, 8).to(dtype).requires_grad_()
    own, got = (results(module, ((x,), {}), device) for device in ("cpu", "xla"))
    expect_close(got, own, results(module, widened(((x,), {}), dtype), "cpu"), dtype)


# Layers, and shapes of what they are given, that have no features, no rows or no length.
EMPTY: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Linear(0, 5), (3, 0)),
    (lambda: nn.Linear(0, 5), (0,)),
    (lambda: nn.Linear(4, 0), (3, 4)),
    (lambda: nn.Linear(4, 0, bias=False), (2, 3, 4)),
    (lambda: nn.Linear(4, 2), (0, 4)),
    (lambda: nn.Linear(4, 2), (2, 0, 4)),
    (lambda: nn.Conv1d(3, 4, 2), (0, 3, 6)),
    (lambda: nn.Conv2d(3, 4, 2), (0, 3, 6, 6)),
    (lambda: nn.Conv2d(3, 4, 2), (0, 6, 6)),
    (lambda: nn.ConvTranspose2d(3, 4, 2), (0, 3, 6, 6)),
    (lambda: nn.BatchNorm1d(4), (0, 4)),
    (lambda: nn.BatchNorm2d(4).eval(), (0, 4, 3, 3)),
    (lambda: nn.InstanceNorm1d(4), (0, 4, 3)),
    (lambda: nn.GroupNorm(2, 4), (0, 4, 3)),
    (lambda: nn.LayerNorm(4), (0, 4)),
    (lambda: nn.LayerNorm(0), (3, 0)),
    (lambda: nn.RMSNorm(4), (0, 4)),
    (lambda: nn.LSTM(3, 4), (5, 0, 3)),
    (lambda: nn.LSTM(3, 4), (0, 2, 3)),
    (lambda: nn.GRU(3, 4, batch_first=True), (0, 5, 3)),
    (lambda: nn.RNNCell(3, 4), (0, 3)),
    (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0), (5, 0, 4)),
    (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0), (0, 3, 4)),
    (lambda: nn.PReLU(4), (0, 4)),
    (lambda: nn.GLU(), (3, 0)),
    (lambda: nn.Softmax(-1), (3, 0)),
    (lambda: nn.LogSoftmax(0), (0, 3)),
    (lambda: nn.MaxPool2d(2), (0, 3, 4, 4)),
    (lambda: nn.AvgPool1d(2), (0, 3, 4)),
    (lambda: nn.AdaptiveAvgPool2d(2), (0, 3, 4, 4)),
    (lambda: nn.AdaptiveMaxPool1d(2), (2, 0, 4)),
    (lambda: nn.Upsample(scale_factor=2), (0, 3, 4, 4)),
    (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (1, 0, 4, 4)),
    (lambda: nn.ReflectionPad2d(1), (0, 3, 4, 4)),
    (lambda: nn.ZeroPad2d(1), (0, 3, 4, 4)),
    (lambda: nn.Unfold(2), (0, 3, 4, 4)),
    (lambda: nn.Fold((4, 4), 2), (0, 12, 9)),
    (lambda: nn.Flatten(), (0, 3, 4)),
    (lambda: nn.CosineSimilarity(), (3, 0)),
    (lambda: nn.PairwiseDistance(), (0, 3)),
    (lambda: nn.Bilinear(3, 2, 4), (0, 3)),
    (lambda: nn.MSELoss(), (0, 3)),
    (lambda: nn.SmoothL1Loss(), (0,)),
    (lambda: nn.GELU(), (0, 2)),
]


@pytest.mark.parametrize(("make", "shape"), EMPTY)
def test_zero_sizes(make, shape):
    torch.manual_seed(0)
    module, arguments = make(), [torch.randn(shape, requires_grad=True)]
    if isinstance(module, (nn.CosineSimilarity, nn.PairwiseDistance, nn.MSELoss, nn.SmoothL1Loss, nn.Bilinear)):
        arguments.append(torch.randn((*shape[:-1], 2) if isinstance(module, nn.Bilinear) else shape))
    try:
        own = results(module, (arguments, {}), "cpu")
    except (RuntimeError, ValueError, IndexError) as error:
        with pytest.raises(type(error)):
            results(module, (arguments, {}), "xla")
        return
    expect_close(results(module, (arguments, {}), "xla"), own, own, torch.float32)


UNTRACED = ("Lazy", "Transformer", "MultiheadAttention")  # several sizes, or Python of their own


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("grad", [True, False])
def test_traced_modules_give_what_modules_give(grad):
    wrong, traced = [], 0
    for info in module_db:
        given = inputs(info, torch.float32, training=False)[:1]
        if not given or given[0].forward_input.kwargs or any(name in info.name for name in UNTRACED):
            continue
        module = info.module_cls(*given[0].constructor_input.args, **given[0].constructor_input.kwargs).eval()
        arguments = [a.detach() if isinstance(a, torch.Tensor) else a for a in given[0].forward_input.args]
        with torch.set_grad_enabled(grad):
            try:
                torch.jit.trace(module, tuple(arguments), check_trace=False)
            except RuntimeError:
                continue  # PyTorch does not trace it
            try:
                module = module.to("xla")
                arguments = tree_map_only(torch.Tensor, lambda t: t.to("xla"), arguments)
                function = torch.jit.trace(module, tuple(arguments), check_trace=False)
                others = tree_map_only(torch.Tensor, lambda t: t.flip(0), arguments)
                for got, want in zip(tensors(function(*others)), tensors(module(*others)), strict=True):
                    torch.testing.assert_close(got.detach(), want.detach(), equal_nan=True)
            except Exception as error:
                wrong.append(f"{info.name}: {type(error).__name__} {error}")
            traced += 1
    assert not wrong, "\n".join(wrong)
    assert traced > 60
