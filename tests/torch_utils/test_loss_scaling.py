"""Gradient scalers and `torch_xla.amp.syncfree`: what is skipped, what it costs, and whether the host looks."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch

import torch_xla
from torch_xla._core.compile import cache
from torch_xla._core.execute.hooks import Hooks
from torch_xla.amp import GradScaler, syncfree

SYNCFREE = [
    (syncfree.SGD, torch.optim.SGD, {"lr": 0.1}),
    (syncfree.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (syncfree.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.5, "dampening": 0.1, "weight_decay": 0.1}),
    (syncfree.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.5, "nesterov": True, "maximize": True}),
    (syncfree.Adam, torch.optim.Adam, {"lr": 0.01, "betas": (0.7, 0.77), "weight_decay": 0.1}),
    (syncfree.Adam, torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    (syncfree.AdamW, torch.optim.AdamW, {"lr": 0.01}),
    (syncfree.AdamW, torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.3}),
]
IDS = [f"{kind.__name__}-{'-'.join(kwargs)}" for kind, _, kwargs in SYNCFREE]
GRADS = [[torch.randn(3, 4), torch.randn(5)] for _ in range(6)]
BAD = (0, 1, 3)  # the steps whose gradients overflowed; the first ones, to see that they do not count


@pytest.fixture
def reads(monkeypatch):
    """`with reads(n):` fails unless the host asks for the values of n tensors."""
    asked = []
    fetch = Hooks.fetch
    monkeypatch.setattr(
        Hooks, "fetch", lambda self, tensor, device: asked.append(tensor.shape) or fetch(tensor, device)
    )

    @contextmanager
    def reading(expected):
        asked.clear()
        yield
        assert len(asked) == expected, asked

    return reading


def parameters(device):
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape).to(device)) for shape in ((3, 4), (5,))]


def load(params, step, scale=1.0, bad=BAD):
    for param, grad in zip(params, GRADS[step], strict=True):
        param.grad = (grad * (math.inf if step in bad else scale)).to(param.device)


def reference(kind, kwargs, skip=BAD):
    params = parameters("cpu")
    optimizer = kind(params, **kwargs)
    for step, grads in enumerate(GRADS):
        if step not in skip:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.clone()
            optimizer.step()
    return [param.detach() for param in params]


def compare(params, expected):
    for ours, theirs in zip(params, expected, strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind, twin, kwargs", SYNCFREE, ids=IDS)
class TestSyncFree:
    @pytest.mark.parametrize("bad", [BAD, ()], ids=["skips where it is told", "steps as its twin"])
    def test_steps(self, kind, twin, kwargs, bad, compiles):
        params = parameters("xla")
        optimizer = kind(params, **kwargs)
        with compiles() as compiled:
            for step in range(len(GRADS)):
                load(params, step, bad=bad)
                told = {"found_inf": torch.tensor(float(step in bad), device="xla")} if bad else {}
                optimizer.step(**told)
                torch_xla.sync()
        assert compiled.value <= 1  # none where another case had the same graph
        compare(params, reference(twin, kwargs, bad))

    @pytest.mark.parametrize("scaler", [GradScaler, lambda **kwargs: torch.amp.GradScaler("xla", **kwargs)])
    def test_scaler_never_reads(self, kind, twin, kwargs, scaler, counted, reads):
        params = parameters("xla")
        optimizer = kind(params, **kwargs)
        scaler = scaler(init_scale=8.0, growth_interval=2)
        scaler.scale(torch.zeros((), device="xla"))
        with counted("UncachedCompile") as compiled, reads(0):
            for step in range(len(GRADS)):
                # The gradients are those of a scaled loss, whatever the scale has become.
                for param, grad in zip(params, GRADS[step], strict=True):
                    param.grad = grad.to("xla") * (math.inf if step in BAD else 1.0) * scaler._scale
                scaler.step(optimizer)
                scaler.update()
                torch_xla.sync()
        assert compiled.value <= 1
        compare(params, reference(twin, kwargs))
        # 8, halved by three overflows, doubled by the two good steps at the end.
        assert scaler.get_scale() == 2.0

    def test_state_survives_a_round_trip_with_its_twin(self, kind, twin, kwargs):
        params = parameters("cpu")
        old = twin(params, **kwargs)
        expected = parameters("cpu")
        other = twin(expected, **kwargs)
        for group, optimizer in ((params, old), (expected, other)):
            for param, grad in zip(group, GRADS[0], strict=True):
                param.grad = grad.clone()
            optimizer.step()
        moved = [torch.nn.Parameter(param.detach().to("xla")) for param in params]
        new = kind(moved, **kwargs)
        new.load_state_dict(old.state_dict())
        for group, optimizer in ((moved, new), (expected, other)):
            for param, grad in zip(group, GRADS[2], strict=True):
                param.grad = grad.to(param.device)
            optimizer.step()
        compare(moved, [param.detach() for param in expected])


def test_found_inf_must_be_a_number():
    optimizer = syncfree.Adam(parameters("xla"))
    with pytest.raises(ValueError, match="found_inf tensor has to be scalar type"):
        optimizer.step(found_inf=torch.zeros(1, device="xla"))


def test_closure_gives_the_loss():
    (weight, _), loss = parameters("xla"), None
    for kind in (syncfree.SGD, syncfree.Adam):
        optimizer = kind([weight], lr=0.1)

        def closure(optimizer=optimizer):
            optimizer.zero_grad()
            loss = (weight**2).sum()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        assert closure().item() < loss.item()


class TestScaler:
    def train(self, scaler, optimizer_of, steps=6):
        params = parameters("xla")
        optimizer = optimizer_of(params)
        scaler.scale(torch.zeros((), device="xla"))
        for step in range(steps):
            for param, grad in zip(params, GRADS[step], strict=True):
                param.grad = grad.to("xla") * (math.inf if step in BAD else 1.0) * scaler._scale
            scaler.step(optimizer)
            scaler.update()
            torch_xla.sync()
        return params

    @pytest.mark.parametrize("scaler", [GradScaler, lambda **kwargs: torch.amp.GradScaler("xla", **kwargs)])
    def test_skips_overflows(self, scaler):
        kwargs = {"lr": 0.1, "momentum": 0.9}
        params = self.train(scaler(init_scale=4.0), lambda p: torch.optim.SGD(p, **kwargs))
        compare(params, reference(torch.optim.SGD, kwargs))

    def test_reads_one_number_a_step_whatever_the_number_of_parameters(self, reads):
        with reads(len(GRADS)):
            self.train(torch.amp.GradScaler("xla"), lambda p: torch.optim.SGD(p, lr=0.1))

    def test_a_skipped_step_is_one_graph(self, compiles):
        """Up to the decision, from there on with the update, and without it."""
        weight = torch.nn.Parameter(torch.ones(4, device="xla"))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        scaler = GradScaler(init_scale=4.0)
        cache.clear()  # another test may have skipped a step
        with compiles(3):
            for step in range(7):
                x = torch.full((4,), math.inf if step == 4 else 1.0 + step).to("xla")
                optimizer.zero_grad()
                scaler.scale((weight * x).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                torch_xla.sync()

    def test_zero_grad_reads_nothing(self, reads):
        with reads(0):
            params = self.train(GradScaler(use_zero_grad=True), lambda p: torch.optim.SGD(p, lr=0.1))
        compare(params, reference(torch.optim.SGD, {"lr": 0.1}))

    def test_unscale_and_clip(self):
        scaler = GradScaler(init_scale=1024.0)
        weight = torch.nn.Parameter(torch.ones(4, device="xla"))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler.scale((weight * 3).sum()).backward()
        assert weight.grad[0].item() == 3 * 1024
        scaler.unscale_(optimizer)
        assert torch.nn.utils.clip_grad_norm_([weight], 2.0).item() == pytest.approx(6.0)
        scaler.step(optimizer)
        scaler.update()
        torch.testing.assert_close(weight.detach().cpu(), torch.zeros(4))

    def test_disabled_does_nothing(self, reads):
        scaler = GradScaler(enabled=False)
        loss = torch.ones((), device="xla", requires_grad=True)
        assert scaler.scale(loss) is loss
        assert scaler.get_scale() == 1.0

    def test_state_dict(self):
        scaler = GradScaler(init_scale=4.0, growth_interval=7)
        self.train(scaler, lambda p: torch.optim.SGD(p, lr=0.1), steps=3)
        other = GradScaler()
        other.load_state_dict(scaler.state_dict())
        other.scale(torch.zeros((), device="xla"))
        assert other.get_scale() == scaler.get_scale() == 1.0
        assert other.get_growth_interval() == 7
