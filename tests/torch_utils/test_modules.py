"""Parametrisations, packed sequences, custom operators and saved states of modules on xla."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from agreement import as_on_cpu, numbers
from torch import Tensor, nn
from torch.nn import utils
from torch.nn.utils import parametrizations, prune

import torch_xla  # noqa: F401


def old_weight_norm(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return utils.weight_norm(module)


@pytest.mark.parametrize(
    "parametrise",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        old_weight_norm,
        utils.spectral_norm,
    ],
)
@as_on_cpu
def test_parametrisations(device: str, parametrise: Callable[[nn.Module], nn.Module]) -> Any:
    module = parametrise(nn.Linear(4, 3)).to(device)
    out = [module(numbers(device)) for _ in range(2)]
    (out[0] * out[1]).sum().backward()
    return out, [p.grad for p in module.parameters()], module.weight


@as_on_cpu
def test_pruning_and_vectors(device: str) -> Any:
    module = nn.Linear(4, 3).to(device)
    prune.l1_unstructured(module, "weight", amount=0.3)
    out = module(numbers(device))
    prune.remove(module, "weight")
    vector = utils.parameters_to_vector(module.parameters())
    utils.vector_to_parameters(vector * 2, module.parameters())
    return out, module.weight, module.bias


@as_on_cpu
def test_packed_sequences(device: str) -> Any:
    rnn = nn.GRU(3, 5, batch_first=True).to(device)
    x = torch.randn(3, 6, 3).to(device).requires_grad_()
    lengths = torch.tensor([6, 2, 4])
    packed = utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    out, hidden = rnn(packed)
    out, result = utils.rnn.pad_packed_sequence(out, batch_first=True)
    assert result.tolist() == [6, 2, 4]
    (out.sum() + hidden.sum()).backward()
    return out, hidden, x.grad


def test_hooks_see_xla_tensors() -> None:
    module, seen = nn.Linear(4, 3).to("xla"), []
    module.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    module.register_forward_hook(lambda m, args, out: out + 1)
    module.register_full_backward_hook(lambda m, inputs, outputs: seen.append(outputs[0].device.type))
    x = numbers("xla").requires_grad_()
    out = module(x)
    out.sum().backward()
    torch.testing.assert_close(out.cpu(), nn.functional.linear(x * 2, module.weight, module.bias).cpu() + 1)
    assert seen == ["xla"]


def test_custom_operators_with_a_cpu_kernel(counted: Callable[..., Any], compiles: Callable[..., Any]) -> None:
    with torch.library._scoped_library("modules", "FRAGMENT"):

        @torch.library.custom_op("modules::scale", mutates_args=(), device_types="cpu")
        def scale(x: Tensor, factor: float) -> Tensor:
            return torch.from_numpy(x.detach().numpy() * factor)

        scale.register_fake(lambda x, factor: torch.empty_like(x))
        scale.register_autograd(
            lambda ctx, gradient: (scale(gradient, ctx.factor), None),
            setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
        )
        x = numbers("xla").requires_grad_()
        with compiles(1):  # forward and backward run inside the graph
            for _ in range(2):
                (gradient,) = torch.autograd.grad(scale(x * 2, 3.0).sum(), x)
                torch_xla.sync()
        assert gradient.tolist() == [6.0] * 4


@as_on_cpu
def test_states_of_module_and_optimizer_continue_training(device: str) -> Any:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.BatchNorm1d(3), nn.Linear(3, 2)).to(device)
        return module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()

    x = torch.randn(5, 4).to(device)
    module, optimizer = make()
    step(module, optimizer)
    file = io.BytesIO()
    torch.save({"module": module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, resumed = make()
    other.load_state_dict(saved["module"])
    resumed.load_state_dict(saved["optimizer"])
    step(other, resumed)
    return list(other.state_dict().values())


def test_safetensors_of_xla_tensors(tmp_path: Path) -> None:
    module = nn.Linear(4, 3).to("xla")
    module.weight.data.mul_(2)  # pending: saving computes it
    safetensors.torch.save_model(module, str(tmp_path / "model.safetensors"))
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors", device="xla:0")
    assert loaded["weight"].device == torch.device("xla:0")
    other = nn.Linear(4, 3).to("xla")
    safetensors.torch.load_model(other, str(tmp_path / "model.safetensors"))
    torch.testing.assert_close(other.weight.cpu(), module.weight.cpu())
    torch.testing.assert_close(loaded["bias"].cpu(), module.bias.cpu())
