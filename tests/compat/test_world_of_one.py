"""What is made for several processes or devices, asked of one."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.nn.functional as F
from probes import python
from torch import nn
from torch.distributed import checkpoint
from torch.nn.parallel import DistributedDataParallel

import torch_xla
import torch_xla.core.functions as xf
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch_xla.distributed import data_parallel, fsdp
from torch_xla.utils.checkpoint_tagger import CheckpointTagger
from torch_xla.utils.keyd_queue import KeydQueue, Queue


@pytest.mark.parametrize(
    ("kind", "expected"), [(xm.REDUCE_SUM, [2, 2]), (xm.REDUCE_MUL, [2, 2]), (xm.REDUCE_MAX, [2, 2])]
)
def test_differentiable_reductions(kind: str, expected: list[float]) -> None:
    x = torch.tensor([3.0, 4.0], device="xla", requires_grad=True)
    out = xf.all_reduce(kind, x, scale=2.0)
    out.sum().backward()
    assert out.tolist() == [6, 8]
    assert x.grad.tolist() == expected
    with pytest.raises(RuntimeError, match="got a gradient of"):
        xf.all_reduce(xm.REDUCE_AND, x).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_reductions_are_scaled_and_keep_the_type(dtype: torch.dtype) -> None:
    x = torch.tensor([2, 5], dtype=dtype, device="xla")
    expected = (x.cpu() * 0.5).to(dtype).tolist()
    given = [x.clone()]
    assert xm.all_reduce(xm.REDUCE_SUM, given, 0.5) is given
    bucket = [x.clone()]
    xm.all_reduce_bucketized_gradients(bucket, 0.5, None, True)
    scattered = xm.reduce_scatter(xm.REDUCE_SUM, x, 0.5, 0, 1)
    for out in (xm.all_reduce(xm.REDUCE_SUM, x, scale=0.5), *given, *bucket, scattered):
        assert out.dtype == dtype and out.tolist() == expected
    assert x.tolist() == [2, 5]


def test_a_mesh_has_the_first_devices() -> None:
    for ids, shape in (([0], (1,)), ([1, 0], (2, 1)), ([3, 1, 0, 2], (2, 2))):
        mesh = xs.Mesh(ids, shape, ("a", "b")[: len(shape)])
        assert mesh.size() == len(ids) and mesh.get_logical_mesh().tolist() == torch.tensor(ids).view(shape).tolist()
    x = torch.ones(2, 2, device="xla")
    xs.mark_sharding(x, xs.Mesh([0], (1, 1), ("a", "b")), ("a", None))
    with pytest.raises(RuntimeError, match=r"\[spmd\] got a mesh of 2 devices.*use_spmd"):
        xs.mark_sharding(x, xs.Mesh([0, 1], (2, 1), ("a", "b")), ("a", None))
    for ids, shape in (([1], (1,)), ([0, 0], (2,)), (list(range(5)), (5,)), ([0, 1], (3,))):
        with pytest.raises(AssertionError, match=r"\[mesh\]"):
            xs.Mesh(ids, shape)


def test_differentiable_gather_and_product() -> None:
    x = torch.arange(6.0, device="xla").view(3, 2).requires_grad_()
    gathered = xf.all_gather(x, dim=1)
    (gathered * torch.tensor([1.0, 2.0], device="xla")).sum().backward()
    assert gathered.tolist() == x.tolist()
    assert x.grad.tolist() == [[1, 2]] * 3
    w = torch.arange(12.0, device="xla").view(4, 3)
    for split in (1, 2):
        assert torch.equal(xf.distributed_mm(w, x, split).cpu(), w.cpu() @ x.detach().cpu())
    with pytest.raises(AssertionError, match=r"\[distributed_mm\]"):
        xf.distributed_mm(w, w)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("whole", [False, True])
def test_batch_norm_over_processes_of_half_types(dtype: torch.dtype, whole: bool) -> None:
    ours = xf.SyncBatchNorm(2).to("xla", dtype if whole else None)
    x = (torch.randn(1, 2, 280, 280) + 3).to(dtype)  # more values than float16 has numbers for
    expected = nn.BatchNorm2d(2)(x.float())
    result = ours(x.to("xla"))
    assert result.dtype == dtype
    torch.testing.assert_close(result.float().cpu(), expected, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 2, 2)])
def test_batch_norm_over_processes(shape: tuple[int, ...]) -> None:
    ours = xf.SyncBatchNorm(3, momentum=1.0).to("xla")
    host = (nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d)(3, momentum=1.0)
    x = torch.randn(shape)
    a, b = x.to("xla").requires_grad_(), x.clone().requires_grad_()
    for module, value in ((ours, a), (host, b)):
        out = module(value)
        (out * out.detach().cos()).sum().backward()
    torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.weight.grad.cpu(), host.weight.grad, rtol=1e-4, atol=1e-5)
    count = x.numel() / 3
    torch.testing.assert_close(ours.running_var.cpu(), host.running_var * (count - 1) / count)
    ours.eval()
    torch.testing.assert_close(ours.running_mean.cpu(), host.running_mean)
    assert ours(a).shape == shape
    with pytest.raises(AssertionError, match=r"\[batch_norm\] got shape \(2, 2\), expected \(n, 3, ...\)"):
        ours(torch.ones(2, 2, device="xla"))


def test_policies_of_wrapping() -> None:
    def named() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.ModuleList([nn.Linear(4, 4)]), nn.MultiheadAttention(8, 2))

    def wrapped(policy: Callable[..., bool], **options: Any) -> list[str]:
        model, _ = fsdp.wrap.recursive_wrap(named(), partial(policy, **options), Wrapper, set(), set(), True)
        return [name for name, module in model.named_modules() if isinstance(module, Wrapper)]

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

    def sized(module: nn.Module, recurse: bool, unwrapped_params: int, least: int) -> bool:
        return unwrapped_params >= least

    linear = {"transformer_layer_cls": {nn.Linear}}
    assert wrapped(fsdp.wrap.transformer_auto_wrap_policy, **linear) == ["0", "1.0", "2.out_proj"]
    assert wrapped(torch.distributed.fsdp.wrap.transformer_auto_wrap_policy, **linear) == ["0", "1.0", "2.out_proj"]
    assert wrapped(fsdp.wrap.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.ModuleList)) == ["1"]
    assert wrapped(fsdp.wrap.size_based_auto_wrap_policy, min_num_params=20) == ["0", "1.0"]
    assert wrapped(sized, least=100) == ["2"]


@pytest.fixture
def group() -> Iterator[None]:
    import torch_xla.distributed.xla_backend  # noqa: F401

    dist.init_process_group("xla", init_method="xla://")
    yield
    dist.destroy_process_group()


def test_a_process_group_of_one(group: None) -> None:
    x = torch.arange(4.0, device="xla")
    same = x.tolist()
    assert (dist.get_world_size(), dist.get_rank(), dist.get_backend()) == (1, 0, "xla")
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    dist.reduce(x, 0, op=dist.ReduceOp.MAX)
    dist.barrier()
    assert x.tolist() == same
    newer = hasattr(dist, "all_gather_single")  # than PyTorch 2.11 or 2.12
    gather = dist.all_gather_single if newer else dist.all_gather_into_tensor
    scatter = dist.reduce_scatter_single if newer else dist.reduce_scatter_tensor
    for collective in (gather, scatter, dist.all_to_all_single):
        out = torch.zeros(4, device="xla")
        collective(out, x)
        assert out.tolist() == same, collective
    for collective in (lambda outs, x: dist.all_gather(outs, x), lambda outs, x: dist.gather(x, outs)):
        outs = [torch.zeros(4, device="xla")]
        collective(outs, x)
        assert outs[0].tolist() == same
    out = torch.zeros(4, device="xla")
    dist.scatter(out, [x])
    assert out.tolist() == same
    outs = [torch.zeros(4, device="xla")]
    dist.all_to_all(outs, [x])
    assert outs[0].tolist() == same
    with pytest.raises(ValueError, match=r"\[process group\] got shape \(3,\)"):
        dist.all_gather([torch.zeros(3, device="xla")], x)


def test_what_builds_on_a_process_group(group: None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    wrapped = DistributedDataParallel(copy.deepcopy(host).to("xla"), gradient_as_bucket_view=True)
    x = torch.randn(5, 3)
    for model, device in ((host, "cpu"), (wrapped, "xla")):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(x.to(device)).square().sum().backward()
            optimizer.step()
    for ours, theirs in zip(wrapped.parameters(), host.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)

    values = torch.arange(4.0, device="xla")
    assert functional_collectives.all_reduce(values, "sum", dist.group.WORLD).tolist() == [0, 1, 2, 3]
    objects: list[object] = [None]
    dist.all_gather_object(objects, {"a": 1})
    assert objects == [{"a": 1}]
    checkpoint.save({"model": wrapped.state_dict(), "values": values}, checkpoint_id=tmp_path)
    results = {"model": {name: torch.zeros_like(v) for name, v in wrapped.state_dict().items()}, "values": values * 0}
    checkpoint.load(results, checkpoint_id=tmp_path)
    assert torch.equal(results["values"], values)
    assert all(torch.equal(results["model"][name], value) for name, value in wrapped.state_dict().items())


def test_a_data_parallel_loop() -> None:
    parallel = data_parallel.DataParallel(lambda: nn.Linear(2, 1), ["xla:1"])
    batches = [torch.full((4, 2), float(k)) for k in range(3)]

    def loop(model: nn.Module, loader: object, device: torch.device, context: data_parallel.Context) -> list[float]:
        count = context.getattr_or("count", lambda: 0)
        context.count = count + 1
        assert next(model.parameters()).device == device == torch.device("xla:1")
        return [batch.sum().item() for batch in loader] + [context.count]

    assert parallel(loop, batches) == [[0, 8, 16, 1]]
    assert parallel(loop, batches) == [[0, 8, 16, 2]]
    plain = data_parallel.DataParallel(nn.Linear(2, 1), [])
    assert plain.devices == ["cpu"]
    assert plain(lambda model, loader, device, context: [k for k, _ in loader], batches) == [[0, 1, 2]]


class Block(nn.Module):
    """A layer with a buffer, checkpointed and wrapped by itself in the tests below."""

    def __init__(self, size: int, out: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, out)
        self.register_buffer("scale", torch.full((out,), 0.5))

    def reset_parameters(self) -> None:
        self.layer.reset_parameters()
        self.scale.fill_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)) * self.scale


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(3, 4), Block(4, 2))


def wrapped_blocks(**options: Any) -> fsdp.XlaFullyShardedDataParallel:
    return fsdp.XlaFullyShardedDataParallel(
        blocks(),
        auto_wrap_policy=partial(fsdp.wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        auto_wrapper_callable=lambda module, **inner: fsdp.XlaFullyShardedDataParallel(
            fsdp.checkpoint_module(module), **inner
        ),
        **options,
    )


def step(model: nn.Module, x: torch.Tensor, clip: Callable[[float], object]) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = model(x)
    out.float().square().sum().backward()
    clip(0.05)
    xm.optimizer_step(optimizer)
    return out


def test_fully_sharded_training_with_one_process(tmp_path: Path) -> None:
    host, wrapped = blocks(), wrapped_blocks()
    assert isinstance(wrapped[0], fsdp.XlaFullyShardedDataParallel) and wrapped[0].layer.weight.device.type == "xla"
    assert wrapped.params_with_grad == []
    x = torch.randn(5, 3)
    step(host, x, lambda bound: nn.utils.clip_grad_norm_(host.parameters(), bound))
    step(wrapped, x.to("xla"), wrapped.clip_grad_norm_)
    for ours, theirs in zip(wrapped.parameters(), host.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)

    state = {"model": wrapped.state_dict(), "shard_metadata": wrapped.get_shard_metadata()}
    xm.save(state, tmp_path / "model_rank-0.pth", master_only=False)
    command = ["-m", "torch_xla.distributed.fsdp.consolidate_sharded_ckpts"]
    python(*command, "--ckpt_prefix", tmp_path / "model", "--ckpt_suffix", "_rank*.pth", imported=True)
    plain = blocks()
    plain.load_state_dict(torch.load(tmp_path / "model_consolidated.pth")["model"])
    assert torch.equal(plain[0].layer.weight, wrapped[0].layer.weight.cpu())


def test_fully_sharded_training_in_a_half_type() -> None:
    wrapped = wrapped_blocks(compute_dtype=torch.bfloat16)
    x = torch.randn(5, 3, device="xla")
    before = wrapped[1].layer.weight.detach().clone()
    assert step(wrapped, x, wrapped.clip_grad_norm_).dtype == torch.bfloat16
    assert wrapped[1].layer.weight.dtype == torch.float32 and wrapped[1].layer.weight.grad.dtype == torch.float32
    assert not torch.equal(wrapped[1].layer.weight, before)
    assert wrapped[0].scale.dtype == torch.bfloat16
    state = fsdp.consolidate_sharded_state_dicts([wrapped.state_dict()], wrapped.get_shard_metadata())
    assert {name: value.dtype for name, value in state.items()} == dict.fromkeys(blocks().state_dict(), torch.float32)
    copied = copy.deepcopy(wrapped)
    with torch.no_grad():
        copied[0].layer.weight.zero_()
    assert not torch.equal(copied(x), wrapped(x))


def test_fully_sharded_modules_that_cannot_be() -> None:
    with torch.device("meta"):
        made = fsdp.XlaFullyShardedDataParallel(Block(3, 4))
    assert made.layer.weight.device.type == "xla" and made.scale.tolist() == [0.5] * 4
    for module, text in ((made, "already wrapped"), (nn.ModuleList(), "has no forward")):
        with pytest.raises(RuntimeError, match=rf"\[fsdp\] .*{text}"):
            fsdp.XlaFullyShardedDataParallel(module)
    with pytest.raises(ValueError, match=r"\[fsdp\] compute_dtype=torch.int8"):
        fsdp.XlaFullyShardedDataParallel(nn.Linear(1, 1), compute_dtype=torch.int8)
    for options, text in (
        ({"sharding_groups": [[0, 1]], "sharding_rank": 0, "sharding_world_size": 2}, r"groups=\[\[0, 1\]\]"),
        ({"sharding_groups": [[0]], "sharding_rank": 1, "sharding_world_size": 2}, "sharding_rank=1"),
    ):
        with pytest.raises(ValueError, match=rf"\[fsdp\] {text}"):
            fsdp.XlaFullyShardedDataParallel(nn.Linear(1, 1), **options)


def test_shards_of_several_processes_are_put_together(tmp_path: Path) -> None:
    """As torch_xla 2 writes them: by elements with padding, by rows, and several parameters in a flat one."""
    weight, rows = torch.arange(6.0).view(3, 2), torch.arange(10.0).view(5, 2)
    flat = torch.arange(7.0)
    for rank in range(2):
        state = {
            "_fsdp_wrapped_module.a._fsdp_shard.weight": F.pad(weight.flatten(), [0, 2])[4 * rank : 4 * rank + 4],
            "_fsdp_shard._fsdp_wrapped_module.rows": F.pad(rows, [0, 0, 0, 1])[3 * rank : 3 * rank + 3],
            "_fsdp_wrapped_module.b._fsdp_shard._fsdp_wrapped_module.flat_param_0": F.pad(flat, [0, 1])[
                4 * rank : 4 * rank + 4
            ],
            "_fsdp_wrapped_module.mean": torch.ones(2, dtype=torch.bfloat16),
        }
        metadata = {
            "shard_info": {
                "_fsdp_wrapped_module.a": {"_fsdp_shard.weight": {"_orig_size": (3, 2), "_orig_name": "weight"}},
                "": {
                    "_fsdp_shard._fsdp_wrapped_module.rows": {"_orig_size": (5, 2), "_orig_name": "rows"},
                },
                "_fsdp_wrapped_module.b": {
                    "_fsdp_shard._fsdp_wrapped_module.flat_param_0": {
                        "_orig_size": (7,), "_orig_name": "_fsdp_wrapped_module.flat_param_0",
                    }
                },
            },
            "flatten_info": {
                "_fsdp_wrapped_module.b._fsdp_wrapped_module.flat_param_0": (["u", "v.w"], [(2, 2), (3,)], [4, 3])
            },
            "buffer_info": {"_fsdp_wrapped_module.mean": {"_orig_dtype": torch.float32}},
            "world_size": 2,
            "rank": rank,
        }  # fmt: skip
        torch.save({"model": state, "shard_metadata": metadata}, tmp_path / f"rank-{9 - rank}.pth")
    result, path = fsdp.consolidate_sharded_model_checkpoints(str(tmp_path / "rank-"), save_path=str(tmp_path / "all"))
    expected = {"a.weight": weight, "rows": rows, "b.u": flat[:4].view(2, 2), "b.v.w": flat[4:], "mean": torch.ones(2)}
    assert path == str(tmp_path / "all")
    for full in (result, torch.load(path)["model"]):
        assert full.keys() == expected.keys()
        assert all(torch.equal(full[name], value) for name, value in expected.items())
        assert full["mean"].dtype == torch.float32
    (tmp_path / "rank-9.pth").unlink()
    with pytest.raises(AssertionError, match=r"\[fsdp\] got files of ranks \[1\], expected each of 2 once"):
        fsdp.consolidate_sharded_model_checkpoints(str(tmp_path / "rank-"))


def test_linear_layers_with_another_forward_pass() -> None:
    model = nn.Sequential(nn.Linear(3, 4), fsdp.checkpoint_module(nn.Linear(4, 2))).to("xla")
    x = torch.randn(5, 3, device="xla")
    expected = model(x)
    calls = []

    def forward(layer: nn.Linear, value: torch.Tensor) -> torch.Tensor:
        calls.append(layer)
        return xs.xla_patched_nn_linear_forward(layer, value)

    fsdp.utils.apply_xla_patch_to_nn_linear(model, forward)
    torch.testing.assert_close(model(x).cpu(), expected.cpu())
    assert calls == list(model)


def test_dynamo_trains_a_model_that_changes_its_buffers(compiles: Any) -> None:
    """Random numbers, running statistics and gradients are those of the same loop without Dynamo."""
    results = []
    x = torch.randn(8, 3)
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).to("xla")
        called = torch.compile(model, backend="openxla") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            with compiles(None if step < 2 else 0):
                optimizer.zero_grad()
                called(x.to("xla")).square().mean().backward()
                optimizer.step()
                torch_xla.sync()
        results.append([value.cpu() for value in model.state_dict().values()])
    for plain, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, plain, rtol=1e-4, atol=1e-6)


def test_queues_and_tags() -> None:
    queue, keyed = Queue(2), KeydQueue(1)
    results: list[object] = []
    reader = threading.Thread(target=lambda: results.extend([keyed.get("b"), keyed.get("a"), queue.get()]))
    reader.start()
    keyed.put("a", 1)
    keyed.put("b", 2)
    queue.put(3)
    queue.close_write()
    reader.join(10)
    assert results == [2, 1, 3]
    assert queue.get() is None
    removed: list[str] = []
    tagger = CheckpointTagger(removed.append)
    for name, path in (("last", "1"), ("best", "1"), ("last", "2"), ("best", "2")):
        tagger.tag(name, path)
    assert removed == ["1"]
    assert CheckpointTagger.load_from_json(tagger.save_to_json()).tags == {"last": "2", "best": "2"}
