"""What the processes of a job run in test_sharding.py; each raises where it does not train as one process does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla.distributed import fsdp
from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

STEPS, BATCH = 3, 8
FSDP = fsdp.XlaFullyShardedDataParallel


class Block(nn.Module):
    """A layer, a normalization, a scalar, a buffer, and a part that is checkpointed if asked for."""

    def __init__(self, width: int, out: int, checkpoints: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(width, out)
        self.norm = nn.LayerNorm(out)
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("scale", torch.full((out,), 0.5))
        self.checkpoints = checkpoints

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.layer(x))) * self.factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpoints:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False) * self.scale
        return self.inner(x) * self.scale


class Net(nn.Module):
    """Blocks, a recurrent layer that keeps its parameters twice, and a layer whose weight is the first one's."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.Sequential(Block(7, 6, checkpoints), Block(6, 7, checkpoints))
        self.memory = nn.GRU(7, 7, batch_first=True)
        self.last = nn.Linear(5, 7)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.blocks(self.first(x))
        return self.last(x) + self.memory(result[:, None])[0][:, 0]


def net(checkpoints: bool = False) -> Net:
    torch.manual_seed(1)
    return Net(checkpoints)


def batches(count: int = STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(BATCH, 5, generator=generator) for _ in range(count)]


def part(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(xr.world_size())[xr.global_ordinal()].to("xla")


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean() * 20


def reference(
    max_norm: float | None = None, pairs: bool = False, make: Callable[[], nn.Module] = net
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """What one process gets on the CPU: parameters and the norms of gradients."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    norms = []
    for batch in batches():
        optimizer.zero_grad()
        for half in batch.view(2, 2, 2, 5).transpose(0, 1).reshape(2, 4, 5) if pairs else [batch]:
            loss_of(model, half).backward()
        if max_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    return model.state_dict(), norms


def states(model: FSDP) -> dict[str, torch.Tensor]:
    """The whole state of a wrapped model, from what all processes have of it."""
    mine = {"model": model.state_dict(), "metadata": model.get_shard_metadata()}
    result = xm.mesh_reduce("states", mine, list)
    return fsdp.consolidate_sharded_state_dicts([each["model"] for each in result], result[0]["metadata"])


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], **limits: float) -> None:
    limits = limits or {"rtol": 1e-4, "atol": 1e-5}
    missing = expected.keys() - found.keys() - {"last.weight"}  # a state without wrappers has a shared one once
    assert not missing, missing
    for name, value in found.items():
        torch.testing.assert_close(value.cpu(), expected[name], **limits, msg=lambda text, name=name: f"{name}: {text}")


def train(model: FSDP, clip: float | None = None) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    norms = []
    for batch in batches():
        optimizer.zero_grad()
        loss_of(model, part(batch)).backward()
        if clip is not None:
            norms.append(model.clip_grad_norm_(clip))
        optimizer.step()
        torch_xla.sync()
    return norms


POLICY = partial(fsdp.wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block, nn.GRU})


def _checkpointed(module: nn.Module, **options: Any) -> FSDP:
    return FSDP(fsdp.checkpoint_module(module), **options)


LAYOUTS: dict[str, dict[str, Any]] = {
    "one wrapper": {},
    "gathered once, by rows": {
        "auto_wrap_policy": POLICY,
        "reshard_after_forward": False,
        "shard_param_on_dim_0": True,
        "optimization_barrier_in_forward": False,
    },
    "root too, flat": {
        "auto_wrap_policy": POLICY,
        "disable_reshard_on_root": False,
        "flatten_parameters": True,
        "sync_on_finalization": True,
    },
    "checkpointed": {"auto_wrap_policy": POLICY, "auto_wrapper_callable": _checkpointed},
}


def fully_sharded(index: int) -> None:
    expected, _ = reference()
    for name, options in LAYOUTS.items():
        model = FSDP(net(), **options)
        whole = sum(p.numel() for p in net().parameters())
        assert sum(p.numel() for p in model.parameters()) < whole / 2 + 128 * len(list(model.parameters())), name
        train(model)
        try:
            close(states(model), expected)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    model = FSDP(net(checkpoints=True), auto_wrap_policy=POLICY)
    train(model)
    close(states(model), expected)
    inside = net()
    inside.first = FSDP(inside.first)  # whose weight the last layer has too
    model = FSDP(inside)
    train(model)
    close(states(model), expected)


def gathered_where_read(index: int) -> None:
    """How often: once in the forward pass and once in the backward pass, or once in all."""
    from torch_xla._core.functions import collectives

    calls: list[str] = []
    record = collectives.record

    def counting(kind: str, *args: Any, **kwargs: Any) -> Any:
        calls.append(kind)
        return record(kind, *args, **kwargs)

    collectives.record = counting  # type: ignore[assignment]
    try:
        for options, gathers in (({}, 4), ({"reshard_after_forward": False}, 2), ({"flatten_parameters": True}, 2)):
            inner = FSDP(nn.Linear(4, 4), **options)
            model = FSDP(nn.Sequential(inner))
            x = torch.ones(2, 4, device="xla", requires_grad=True)
            calls.clear()
            model(x).sum().backward()
            # The gradient of the input needs the weight again; nothing needs the bias.
            expected = gathers - 1 if gathers == 4 else gathers
            assert calls.count("all_gather") == expected, (options, calls)
            assert calls.count("reduce_scatter") == (1 if "flatten_parameters" in options else 2), (options, calls)
    finally:
        collectives.record = record
    torch_xla.sync()


def clipped_and_accumulated(index: int) -> None:
    """Norms over the processes, and gradients that a later backward pass reduces."""
    expected, norms = reference(max_norm=0.5)
    model = FSDP(net(), auto_wrap_policy=POLICY)
    result = train(model, clip=0.5)
    torch.testing.assert_close(torch.tensor([n.item() for n in result]), torch.tensor(norms), rtol=1e-4, atol=1e-5)
    close(states(model), expected)

    expected, _ = reference(pairs=True)
    model = FSDP(net(), auto_wrap_policy=POLICY, flatten_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for batch in batches():
        optimizer.zero_grad()
        first, second = part(batch).chunk(2)
        with model.no_sync():
            loss_of(model, first).backward()
        assert model.params_with_grad == []
        loss_of(model, second).backward()
        optimizer.step()
        torch_xla.sync()
    close(states(model), expected)

    # What only the pass without reduction reached is reduced at the end of the next.
    two = FSDP(Two())
    with two.no_sync():
        two(torch.ones(1, 2, device="xla") * (index + 1), "a").sum().backward()
    two(torch.ones(1, 2, device="xla"), "b").sum().backward()
    gradients = {name: param.grad for name, param in two.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values()), gradients
    first = next(value for name, value in gradients.items() if "a_FSDP" in name and name.endswith("weight"))
    mine = xm.mesh_reduce("gradient", first[:4].cpu(), list)
    torch.testing.assert_close(mine[0], torch.full((4,), 1.5))


def types_and_files(index: int, folder: str) -> None:
    """Half types, frozen parameters, and files of each process."""
    half = FSDP(net(), auto_wrap_policy=POLICY, compute_dtype=torch.bfloat16, fp32_reduce_scatter=True)
    assert half(part(batches()[0])).dtype == torch.bfloat16
    train(half)
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in half.params_with_grad)
    close(states(half), reference()[0], rtol=0.1, atol=0.1)

    frozen = net()
    frozen.first.requires_grad_(False)
    model = FSDP(frozen, auto_wrap_policy=POLICY)
    train(model)
    state = states(model)
    assert torch.equal(state["first.weight"].cpu(), net().first.weight.detach())
    assert not torch.equal(state["blocks.0.layer.weight"].cpu(), net().blocks[0].layer.weight)

    model = FSDP(net(), auto_wrap_policy=POLICY, flatten_parameters=True)
    train(model)
    state = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}
    path = f"{folder}/net_rank-{xr.global_ordinal()}-of-{xr.world_size()}.pth"
    xm.save(state, path, master_only=False)
    again = FSDP(net(), auto_wrap_policy=POLICY, flatten_parameters=True)
    again.load_state_dict(torch.load(path, weights_only=False)["model"])
    x = part(batches()[0])
    assert torch.equal(again(x).cpu(), model(x).cpu())
    assert again.module.module.first.bias.shape == (7,)
    xm.rendezvous("saved")


class Two(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        return getattr(self, which)(x)


def zero(index: int) -> None:
    """Steps with bounded norms, the last one by another optimizer that was given the state of the first."""
    expected, norms = reference(max_norm=0.5, make=blocks)
    model = blocks().to("xla")
    optimizer = _zero(model)
    results = []
    for number, batch in enumerate(batches()):
        if number == STEPS - 1:
            saved = xm._maybe_convert_to_cpu(optimizer.state_dict())
            assert saved["sharded_master_weights"][1].shape == (4, 5)  # of 7 rows, and one of padding
            kept = sum(v.numel() for s in saved["base_state"].values() for v in s.values() if v.dim())
            assert kept < 1.4 * sum(p.numel() for p in model.parameters())  # two values for each of half of the rows
            optimizer = _zero(model)
            optimizer.load_state_dict(saved)
        loss_of(model, part(batch)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        results.append(optimizer.grad_norm)
        torch_xla.sync()
    close(model.state_dict(), expected)
    torch.testing.assert_close(torch.tensor([n.item() for n in results]), torch.tensor(norms), rtol=1e-4, atol=1e-5)


def blocks() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(Block(5, 7), Block(7, 3))


def _zero(model: nn.Module) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        max_norm=0.5,
        sharding_groups=[[0, 1]],
        save_master_weights=True,
        lr=0.02,
    )
