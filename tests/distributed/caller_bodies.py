"""What the processes of a job run in test_callers.py: libraries as users call them."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(24, 4, generator=generator), torch.randn(24, 2, generator=generator))


def model() -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def accelerate_loop(index: int, folder: str) -> None:
    """Trains, gathers metrics, saves and loads."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    assert accelerator.num_processes == xr.world_size() and accelerator.process_index == index
    assert accelerator.device == torch_xla.device()
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    train_loader = DataLoader(data(), batch_size=2)
    module, optimizer, train_loader = accelerator.prepare(module, optimizer, train_loader)
    host = model()
    host_optimizer = torch.optim.SGD(host.parameters(), lr=0.1)
    for inputs, targets in DataLoader(torch.utils.data.Subset(data(), range(20)), batch_size=4):
        host_optimizer.zero_grad()
        nn.functional.mse_loss(host(inputs), targets).backward()
        host_optimizer.step()
    for number, (inputs, targets) in enumerate(train_loader):
        if number == 5:
            break
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(module(inputs), targets))
        optimizer.step()
    for ours, theirs in zip(accelerator.unwrap_model(module).parameters(), host.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)

    module.eval()
    seen = []
    with torch.no_grad():
        for inputs, _ in accelerator.prepare(DataLoader(data(), batch_size=4)):
            seen.append(accelerator.gather_for_metrics(inputs).cpu())
    assert torch.equal(torch.cat(seen), data().tensors[0])
    uneven = accelerator.prepare(DataLoader(torch.utils.data.TensorDataset(torch.arange(21)), batch_size=4))
    assert torch.cat([accelerator.gather_for_metrics(batch).cpu() for (batch,) in uneven]).tolist() == list(range(21))

    accelerator.save_state(folder)
    with torch.no_grad():
        for param in module.parameters():
            param.zero_()
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    for ours, theirs in zip(accelerator.unwrap_model(module).parameters(), host.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)
    assert accelerator.reduce(torch.tensor([float(index)], device=accelerator.device), "sum").item() == 1
    xm.rendezvous("over")


def split_by_transformers(index: int, folder: str) -> None:
    """A model by ``tp_plan="auto"``, and by a `DistributedConfig`: its values, and a step's."""
    import torch.distributed as dist
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    torch_xla.experimental.use_as_accelerator()
    dist.init_process_group()
    tokens = torch.arange(12).view(2, 6)
    host = LlamaForCausalLM.from_pretrained(folder)
    expected = host(tokens, labels=tokens)
    expected.loss.backward()
    for options in (
        {"tp_plan": "auto"},
        {"distributed_config": DistributedConfig(tp_size=2)},
        {"distributed_config": DistributedConfig(fsdp_size=2)},
    ):
        split = LlamaForCausalLM.from_pretrained(folder, **options)
        assert {param.device for param in split.parameters()} == {torch.device("xla:0")}
        assert sum(param.to_local().numel() for param in split.parameters() if hasattr(param, "to_local")) > 0
        found = split(tokens.to("xla"), labels=tokens.to("xla"))
        logits = found.logits.full_tensor() if hasattr(found.logits, "full_tensor") else found.logits
        torch.testing.assert_close(logits.detach().cpu(), expected.logits.detach(), rtol=1e-4, atol=1e-5)
        found.loss.backward()
        for (name, param), theirs in zip(split.named_parameters(), host.parameters(), strict=True):
            grad = param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad
            torch.testing.assert_close(grad.cpu(), theirs.grad, rtol=1e-3, atol=1e-5, msg=f"{options}: {name}")
