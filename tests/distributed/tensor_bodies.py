"""What the processes of a job run in test_tensors.py: DTensors and functional collectives, also compiled by Dynamo."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from collective_bodies import gather_single, same, scatter_single, start, values
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_xla
import torch_xla.core.xla_model as xm


def distributed_tensors(index: int) -> None:
    """Tensors that are split, of which one process has the values, and what is computed with them."""
    rank, size = start()
    mesh = init_device_mesh("xla", (size,))
    whole = values(0, (5, 4))
    mine = whole if rank == 0 else torch.zeros(5, 4)  # the others get it
    for placement in (Shard(0), Shard(1), Replicate(), Partial()):
        made = distribute_tensor(mine, mesh, [placement])
        assert isinstance(made, DTensor) and made.device.type == "xla" and made.shape == whole.shape
        if isinstance(placement, Shard):
            same(made.to_local(), whole.chunk(size, placement.dim)[rank], placement)
        same(made.full_tensor(), whole, placement)
    own = distribute_tensor(values(rank, (2, 2)), mesh, [Replicate()], src_data_rank=None)
    same(own.to_local(), values(rank, (2, 2)), "each its own")
    rows = distribute_tensor(mine.clone().requires_grad_(), mesh, [Shard(0)])
    assert rows.requires_grad and rows.is_leaf
    file = io.BytesIO()
    torch.save(rows, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.device.type == "xla" and loaded.placements == rows.placements
    same(loaded.to_local().detach(), whole.chunk(size)[rank], "from a file")
    columns = rows.redistribute(mesh, [Shard(1)])
    same(columns.to_local().detach(), whole.chunk(size, 1)[rank], "redistributed")
    product = rows @ distribute_tensor(values(1, (4, 3)), mesh, [Replicate()])
    same(product.full_tensor().detach(), whole @ values(1, (4, 3)), "product")
    inner = columns @ distribute_tensor(values(1, (4, 3)), mesh, [Shard(0)])
    assert inner.placements == (Partial(),)
    inner.redistribute(mesh, [Replicate()]).square().sum().backward()
    host = whole.clone().requires_grad_()
    (host @ values(1, (4, 3))).square().sum().backward()
    same(rows.grad.full_tensor(), host.grad, "gradient")
    same(rows.detach().mean(0).full_tensor(), whole.mean(0), "mean")
    same(torch.softmax(rows.detach(), 0).full_tensor(), whole.softmax(0), "softmax")

    layer = nn.Linear(4, 6)
    for param in layer.parameters():
        dist.broadcast(param.data, 0)
    x = values(7, (3, 4))

    def split(name: str, module: nn.Module, mesh: Any) -> None:
        for key, param in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(param, mesh, [Shard(0)])))

    ours = distribute_module(
        copy.deepcopy(layer),
        mesh,
        split,
        lambda module, inputs, mesh: (distribute_tensor(inputs[0], mesh, [Replicate()]),),
        lambda module, outputs, mesh: outputs.full_tensor(),
    )
    same(ours(x).detach(), layer(x).detach(), "module")
    plain = distribute_module(copy.deepcopy(layer), mesh)
    assert all(p.placements == (Replicate(),) for p in plain.parameters())
    mlp = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    for param in mlp.parameters():
        dist.broadcast(param.data, 0)
    ours = parallelize_module(copy.deepcopy(mlp), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    out = ours(x.to("xla"))
    out.square().sum().backward()
    mlp(x).square().sum().backward()
    same(out.detach(), mlp(x).detach(), "tensor parallel")
    same(ours[0].weight.grad.full_tensor(), mlp[0].weight.grad, "tensor parallel")


def attention(index: int) -> None:
    """Attention whose batches, heads or sequences are split, with and without a bias, and a recurrent layer."""
    import torch.nn.functional as F
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    _, size = start()
    mesh = init_device_mesh("xla", (size,))
    given = [values(i, (2, 4, 8, 4)).sin() for i in range(3)]
    for dim, bias_shape in ((0, None), (1, None), (0, (8, 8)), (1, (2, 4, 8, 8))):
        host = [x.clone().requires_grad_() for x in given]
        ours = [distribute_tensor(x.clone(), mesh, [Shard(dim)]).requires_grad_() for x in given]
        options: list[dict[str, Any]] = [{"is_causal": bias_shape is None} for _ in range(2)]
        if bias_shape is not None:
            bias = values(9, bias_shape)
            options[0]["attn_mask"] = bias.clone().requires_grad_()
            split = Shard(dim) if len(bias_shape) > 2 else Replicate()
            options[1]["attn_mask"] = distribute_tensor(bias.clone(), mesh, [split]).requires_grad_()
        expected = F.scaled_dot_product_attention(*host, **options[0])
        result = F.scaled_dot_product_attention(*ours, **options[1])
        assert result.placements == (Shard(dim),), result.placements
        same(result.full_tensor().detach(), expected.detach(), (dim, bias_shape))
        expected.square().sum().backward()
        result.full_tensor().square().sum().backward()
        masks = [o["attn_mask"] for o in options] if bias_shape is not None else []
        for a, b in [*zip(ours, host, strict=True), *([tuple(reversed(masks))] if masks else [])]:
            same(a.grad.full_tensor(), b.grad, (dim, bias_shape, "gradient"))

    host = [x.clone().requires_grad_() for x in given]
    F.scaled_dot_product_attention(*host, is_causal=True).square().sum().backward()
    parts = [x.clone().to("xla") for x in given]
    with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 3):
        for x in parts:
            x.requires_grad_()
        out = F.scaled_dot_product_attention(*parts, is_causal=True)
        out.square().sum().backward()
        for x in parts:
            x.requires_grad_(False)
    result = context_parallel_unshard(mesh, [x.grad for x in parts], [2] * 3)
    for a, b in zip(result, host, strict=True):
        same(a, b.grad, "a ring")

    layer = nn.LSTM(4, 3, batch_first=True)
    for param in layer.parameters():
        dist.broadcast(param.data, 0)
    split_layer = distribute_module(copy.deepcopy(layer), mesh)
    split_layer._flat_weights = [getattr(split_layer, name) for name in split_layer._flat_weights_names]
    x = values(5, (4, 5, 4))
    state = [torch.zeros(1, 4, 3) for _ in range(2)]
    ours, _ = split_layer(
        distribute_tensor(x, mesh, [Shard(0)]), tuple(distribute_tensor(s, mesh, [Shard(1)]) for s in state)
    )
    same(ours.full_tensor().detach(), layer(x, tuple(state))[0].detach(), "LSTM")


def functional(index: int) -> None:
    """Functional collectives, also with gradients, and what is in a graph that Dynamo traces."""
    rank, size = start()
    group = dist.group.WORLD
    everything = [values(r, (size, 4)) for r in range(size)]
    x = everything[rank].to("xla")
    total, joined = sum(everything), torch.cat(everything)
    gather = getattr(funcol, "all_gather_single", funcol.all_gather_tensor)
    gather_several = getattr(funcol, "all_gather_single_coalesced", funcol.all_gather_into_tensor_coalesced)
    scatter_several = getattr(funcol, "reduce_scatter_single_coalesced", funcol.reduce_scatter_tensor_coalesced)
    scatter = getattr(funcol, "reduce_scatter_single", funcol.reduce_scatter_tensor)

    def run(x: torch.Tensor) -> dict[str, torch.Tensor]:
        result = {
            "all_reduce": funcol.all_reduce(x, "sum", group),
            "avg": funcol.all_reduce(x, "avg", group),
            "all_gather": gather(x, 0, group),
            "all_gather 1": gather(x, 1, group),
            "reduce_scatter": scatter(x, "sum", 0, group),
            "broadcast": funcol.broadcast(x, size - 1, group),
            "all_to_all": funcol.all_to_all_single(x, None, None, group),
            "uneven": funcol.all_to_all_single(x, [1] * size, [1] * size, group),
            "permute": funcol.permute_tensor(x.view(-1), [(r + 1) % size for r in range(size)], group),
        }
        for kind, several in (
            ("all_reduce", funcol.all_reduce_coalesced([x, x * 2], "sum", group)),
            ("all_gather", gather_several([x, x * 2], group)),
            ("reduce_scatter", scatter_several([x, x * 2], "sum", [0, 0], group)),
        ):
            result[kind + " one"], result[kind + " two"] = several
        return {name: value + 0 for name, value in result.items()}

    exchanged = torch.stack([values(r, (size, 4))[rank] for r in range(size)])
    target = {
        "all_reduce": total,
        "avg": total / size,
        "all_gather": joined,
        "all_gather 1": torch.cat(everything, 1),
        "reduce_scatter": total[rank : rank + 1],
        "broadcast": everything[size - 1],
        "all_to_all": exchanged,
        "uneven": exchanged,
        "permute": everything[(rank - 1) % size].view(-1),
    }
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        target[kind + " one"], target[kind + " two"] = target[kind], target[kind] * 2
    for fn in (run, torch.compile(run, backend="openxla", fullgraph=True)):
        for _ in range(2):
            result = fn(x)
            torch_xla.sync()
            for name, value in target.items():
                same(result[name], value, (fn, name))

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        out = y.new_empty(size * size, 4)
        gather_single(out, y)
        part = y.new_empty(1, 4)
        scatter_single(part, y)
        swapped = torch.empty_like(y)
        dist.all_to_all_single(swapped, y)
        return out.sum() + part.sum() + swapped.sum()

    compiled = torch.compile(step, backend="openxla", fullgraph=True)
    for _ in range(2):
        expected = step(x)
        same(compiled(x), expected.cpu(), "dist.* compiled")

    def classic(x: torch.Tensor) -> torch.Tensor:
        total = xm.all_reduce("sum", x * 2)
        xm.all_reduce("max", [total])
        return total.sum() + xm.all_gather(x).sum() + xm.reduce_scatter("sum", total, 1.0, 0, size).sum()

    same(torch.compile(classic, backend="openxla", fullgraph=True)(x), classic(x).cpu(), "xm.* compiled")

    # Gradients.
    for fn, reference in (
        (lambda t: gather(t, 0, group), "gather"),
        (lambda t: scatter(t, "sum", 0, group), "scatter"),
        (lambda t: funcol.all_to_all_single_autograd(t, [1] * size, [1] * size, group), "exchange"),
        (lambda t: funcol.all_reduce(t, "sum", group), "all_reduce"),
    ):
        leaf = x.clone().requires_grad_()
        out = fn(leaf)
        (out * 1.0).sum().backward()
        factor = 1 if reference in ("scatter", "exchange") else size
        same(leaf.grad, torch.full((size, 4), float(factor)), reference)
