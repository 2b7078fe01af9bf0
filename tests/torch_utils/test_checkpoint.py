"""Checkpointing: the same numbers, less memory. What is computed again must survive XLA's merging of equal work."""

from __future__ import annotations

from functools import cache as once

import pytest
import torch
from agreement import closely, on_both
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import torch_xla
import torch_xla.utils.checkpoint
from torch_xla._core.compile import cache

MODES = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
WIDTH, ROWS, DEPTH = 32, 256, 8


class Stack(torch.nn.Module):
    def __init__(self, depth, dropout, wrap):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(WIDTH, 4 * WIDTH),
                torch.nn.GELU(),
                torch.nn.Dropout(dropout),
                torch.nn.Linear(4 * WIDTH, WIDTH),
            )
            for _ in range(depth)
        )
        self.wrap = wrap

    def forward(self, x):
        for block in self.blocks:
            x = x + self.wrap(block, x)
        return x


def plain(block, x):
    return block(x)


def wrapped(reentrant, **kwargs):
    return lambda block, x: checkpoint(block, x, use_reentrant=reentrant, **kwargs)


def run(wrap, *, depth=3, dropout=0.0, autocast=False, **backward):
    """Loss, gradients and, where the one graph of the step is compiled, the bytes XLA needs for temporary values."""
    torch.manual_seed(3)
    model = Stack(depth, dropout, wrap).to("xla")
    x = torch.randn(ROWS, WIDTH).to("xla").requires_grad_()
    torch_xla.sync()
    torch_xla.manual_seed(5)
    cache.clear()
    with torch.autocast("xla", enabled=autocast):
        loss = model(x).square().mean()
    loss.backward(**backward)
    torch_xla.sync()
    temporary = [executable.keep.memory_analysis().temp_size_in_bytes for executable in cache._executables.values()]
    assert len(temporary) <= 1
    return loss.item(), [x.grad.cpu(), *(p.grad.cpu() for p in model.parameters())], sum(temporary)


@once
def deep(dropout=0.0):
    """The same of a deep stack without checkpoints."""
    return run(plain, depth=DEPTH, dropout=dropout)


@MODES
@pytest.mark.parametrize("dropout, autocast", [(0.0, False), (0.3, False), (0.3, True)])
def test_numbers_are_those_without_it(reentrant, dropout, autocast):
    loss, grads, _ = run(plain, dropout=dropout, autocast=autocast)
    again_loss, again_grads, _ = run(wrapped(reentrant), dropout=dropout, autocast=autocast)
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if autocast else {}
    assert again_loss == pytest.approx(loss, rel=1e-2 if autocast else 1e-6)
    torch.testing.assert_close(again_grads, grads, **tolerance)


@MODES
@pytest.mark.parametrize(
    "dropout, backward, most",
    [(0.0, {}, 0.3), (0.1, {}, 0.5), (0.0, {"retain_graph": True}, 0.3)],
    ids=["plain", "dropout", "retained graph"],
)
@pytest.mark.compiled("it asks how much memory a program needs")
@pytest.mark.costs("deep models are compiled")
def test_memory_drops_on_a_deep_stack(reentrant, dropout, backward, most):
    *_, without = deep(dropout)
    *_, with_it = run(wrapped(reentrant), depth=DEPTH, dropout=dropout, **backward)
    assert with_it < most * without


@pytest.mark.compiled("it asks how much memory a program needs")
def test_memory_drops_where_random_state_is_not_kept():
    *_, without = deep()
    *_, with_it = run(wrapped(False, preserve_rng_state=False), depth=DEPTH)
    assert with_it < 0.3 * without


@pytest.mark.compiled("it asks how much memory a program needs")
def test_older_name():
    _, grads, without = deep()
    _, again, with_it = run(torch_xla.utils.checkpoint.checkpoint, depth=DEPTH)
    assert with_it < 0.3 * without
    torch.testing.assert_close(again, grads)


@MODES
def test_training_compiles_once(reentrant, compiles):
    model = Stack(2, 0.1, wrapped(reentrant)).to("xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(8, WIDTH).to("xla").requires_grad_()
    losses = []
    torch_xla.sync()
    cache.clear()  # both modes make the same graph
    with compiles(1):
        for _ in range(6):
            optimizer.zero_grad()
            x.grad = None
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            torch_xla.sync()
            losses.append(loss.detach())
    assert losses[-1].item() < losses[0].item()


@MODES
def test_random_state_goes_on_as_without_it(reentrant):
    states = []
    for wrap in (plain, wrapped(reentrant)):
        run(wrap, dropout=0.5)
        states.append(torch.xla.get_rng_state().tolist())
    assert states[0] == states[1]


def text_of(outputs):
    return torch_xla._XLAC._get_xla_tensors_text(outputs)


def test_a_second_derivative_is_no_recomputation():
    x = torch.randn(4, 4, device="xla", requires_grad=True)
    (grad,) = torch.autograd.grad((x.sin() @ x).sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert "optimization_barrier" not in text_of([x.grad])


def test_second_derivative_through_a_checkpoint():
    def function(x):
        return (x.sin() @ x).tanh()

    grads = {}
    for wrap in (plain, wrapped(False)):
        x = torch.linspace(-1, 1, 16).view(4, 4).to("xla").requires_grad_()
        (grad,) = torch.autograd.grad(wrap(function, x).sum(), x, create_graph=True)
        grad.square().sum().backward()
        grads[wrap] = x.grad.cpu()
    first, second = grads.values()
    torch.testing.assert_close(second, first)


def test_what_runs_without_gradients_inside_is_part_of_it():
    def function(x, w):
        y = x @ w
        with torch.no_grad():
            scale = y.abs().amax()
        return (y / scale).tanh()

    w = torch.randn(4, 4, device="xla", requires_grad=True)
    x = torch.randn(4, 4, device="xla", requires_grad=True)
    checkpoint(function, x, w, use_reentrant=False).sum().backward()
    lines = [line for line in text_of([w.grad]).splitlines() if "optimization_barrier" in line]
    assert len(lines) == 2  # x and w, not the scale too


def test_nested():
    def inner(x, w):
        return torch.tanh(x @ w)

    def outer(x, w, reentrant):
        return checkpoint(inner, checkpoint(inner, x, w, use_reentrant=reentrant), w, use_reentrant=reentrant)

    grads = []
    for reentrant in (True, False, None):
        w = torch.linspace(-1, 1, 16).view(4, 4).to("xla").requires_grad_()
        x = torch.linspace(-2, 1, 16).view(4, 4).to("xla").requires_grad_()
        if reentrant is None:
            inner(inner(x, w), w).sum().backward()
        else:
            checkpoint(outer, x, w, reentrant, use_reentrant=reentrant).sum().backward()
        grads.append([x.grad.cpu(), w.grad.cpu()])
    torch.testing.assert_close(grads[0], grads[2])
    torch.testing.assert_close(grads[1], grads[2])


@on_both(closely)
def test_sequential_and_batch_statistics(device):
    layers = [torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 2)]
    model, x = torch.nn.Sequential(*layers).to(device), torch.randn(8, 4).to(device).requires_grad_()
    checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
    return [x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


def test_barrier_changes_no_value():
    from torch_xla.core import xla_model as xm

    x, y = torch.arange(4.0, device="xla"), torch.ones(2, 2, device="xla")
    view = x[1:3]
    doubled = x * 2
    xm.optimization_barrier_([x, y])
    assert "optimization_barrier" in text_of([x])
    assert (x.tolist(), y.tolist(), view.tolist()) == ([0, 1, 2, 3], [[1, 1], [1, 1]], [1, 2])
    assert doubled.tolist() == [0, 2, 4, 6]


def test_barrier_on_a_leaf_that_was_saved():
    from torch_xla.core import xla_model as xm

    w = torch.nn.Parameter(torch.full((2,), 3.0, device="xla"))
    loss = (w * w).sum()
    xm.optimization_barrier_([w])
    loss.backward()
    assert w.grad.tolist() == [6.0, 6.0]
