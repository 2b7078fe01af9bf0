"""Modules that move, and `parameter.data = tensor` of another device, keep parameters, ties, hooks and optimizers."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import torch_xla


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.norm(self.embed(x)))


def train(model, optimizer, device, steps=3):
    losses = []
    for step in range(steps):
        x = torch.arange(5).add(step).remainder(7).to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), x)
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, 0.1)])
def test_optimizer_built_before_the_move_trains_the_moved_weights(make):
    torch.manual_seed(0)
    reference = Tied()
    torch.manual_seed(0)
    model = Tied()
    expected = train(reference, make(reference.parameters()), "cpu")
    optimizer = make(model.parameters())
    assert model.to("xla") is model
    torch.testing.assert_close(
        torch.tensor(train(model, optimizer, "xla")), torch.tensor(expected), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(model.embed.weight.cpu(), reference.embed.weight, rtol=1e-3, atol=1e-4)


def test_ties_and_identity_survive_both_ways():
    model = Tied()
    before = dict(model.named_parameters())
    for device in ("xla", "cpu", "xla:1", "xla:0", "cpu"):
        model.to(device)
        assert model.head.weight is model.embed.weight is before["embed.weight"]
        assert (
            model.norm.running_mean.device
            == model.embed.weight.device
            == torch.device(device if device != "xla" else "xla:0")
        )
        assert type(model.embed.weight) is nn.Parameter and model.embed.weight.is_leaf


def test_values_and_dtype_survive():
    model = nn.Linear(3, 2)
    weight = model.weight.detach().clone()
    model.to("xla", torch.bfloat16)
    assert model.weight.dtype == torch.bfloat16 and model.weight.device.type == "xla"
    torch.testing.assert_close(model.weight.cpu(), weight.bfloat16())
    model.to("cpu", torch.float32)
    torch.testing.assert_close(model.weight.detach(), weight.bfloat16().float())


def test_gradients_move_along():
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    grad = model.weight.grad.clone()
    model.to("xla")
    assert model.weight.grad.device.type == "xla"
    torch.testing.assert_close(model.weight.grad.cpu(), grad)


def test_meta_parameters_are_materialised_in_place():
    with torch.device("meta"):
        model = Tied()
    weight = model.embed.weight
    model.to_empty(device="xla")
    assert model.head.weight is model.embed.weight is weight
    assert weight.device.type == "xla"


def test_attributes_and_subclasses_of_parameters_survive():
    class Special(nn.Parameter):
        pass

    model = nn.Linear(3, 2)
    model.weight = Special(model.weight.detach())
    model.weight.sharded = "yes"
    weight = model.weight
    model.to("xla")
    assert model.weight is weight and type(weight) is Special and weight.sharded == "yes"
    assert weight.device.type == "xla"


def test_a_live_graph_on_the_cpu_does_not_prevent_the_move():
    model = nn.Linear(3, 2)
    weight = model.weight
    reference = model(torch.ones(1, 3))
    model.to("xla")
    assert model.weight is weight
    model(torch.ones(1, 3, device="xla")).sum().backward()
    assert model.weight.grad.device.type == "xla"
    with pytest.raises(RuntimeError, match="same device"):
        reference.sum().backward()


def test_hooks_and_weak_references_survive():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    held, seen = weakref.ref(model.weight), []
    model.weight.register_hook(lambda grad: grad * 2)
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append((p is held(), p.grad.device.type)))
    model.to("xla")
    assert model.weight is held()
    before = model.weight.detach().cpu()
    model(torch.ones(1, 3, device="xla")).sum().backward()
    assert seen == [(True, "xla")] and model.weight.grad.eq(2).all()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach().cpu(), before - 0.2)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_scripted_module_moves():
    model = torch.jit.script(nn.Linear(3, 2))
    x = torch.ones(1, 3)
    expected = model(x)
    torch.testing.assert_close(model.to("xla")(x.to("xla")).cpu(), expected)
    torch.testing.assert_close(model.to("cpu")(x), expected)


DATA = {
    "another shape": lambda d: torch.arange(6.0, device=d),
    "a view": lambda d: torch.arange(6.0, device=d)[1:4:2],
    "a transposed one": lambda d: torch.arange(6.0, device=d).view(2, 3).t(),
    "another type": lambda d: torch.ones(2, dtype=torch.bfloat16, device=d),
    "an inference tensor": torch.inference_mode()(lambda d: torch.ones(2, device=d)),
    "pending": lambda d: torch.ones(3, device=d) * 2,
}


def check_same(ours, theirs):
    assert ours.dtype == theirs.dtype and ours.stride() == theirs.stride()
    assert ours.storage_offset() == theirs.storage_offset()
    torch.testing.assert_close(ours.detach().cpu(), theirs)


@pytest.mark.parametrize("path", ["cpu xla", "xla cpu", "xla xla", "cpu xla cpu xla:1 xla"])
@pytest.mark.parametrize("name", DATA)
def test_data_of_another_device(name, path):
    first, *others = path.split()
    parameter = nn.Parameter(torch.zeros(4, device=first))
    detached = parameter.detach()
    for device in others:
        expected, given = DATA[name]("cpu"), DATA[name](device)
        parameter.data = given
        assert parameter.device == torch.empty(0, device=device).device and parameter.is_leaf
        assert parameter.data_ptr() == given.data_ptr()
        check_same(parameter, expected)
        (gradient,) = torch.autograd.grad((parameter * 3).sum(), parameter)
        assert gradient.device == parameter.device and gradient.eq(3).all()
        if name != "an inference tensor":
            parameter.data.add_(1)  # an alias of what it was given
            check_same(given, expected + 1 if expected.is_contiguous() else expected.add_(1))
    assert detached.device.type == first and detached.eq(0).all()


def test_data_that_is_a_conjugate():
    parameter = nn.Parameter(torch.zeros(4))
    z = torch.complex(torch.ones(2), torch.arange(2.0))
    parameter.data = z.to("xla").conj()
    torch.testing.assert_close((parameter * 1).detach().cpu(), z.conj() * 1)


def test_a_moved_parameter_is_a_tensor_like_others():
    parameter = nn.Parameter(torch.zeros(4))
    parameter.data = torch.arange(4.0, device="xla")
    view = parameter.detach()[1:3]
    with torch.no_grad():
        parameter.mul_(2)
        parameter[0] = 7
    torch_xla.sync()
    assert parameter.tolist() == [7, 2, 4, 6] and view.tolist() == [2, 4]
    other = nn.Parameter(torch.zeros(1))
    other.data = parameter
    assert other.data_ptr() == parameter.data_ptr() and other.tolist() == [7, 2, 4, 6]
    with torch.no_grad():
        other.data = other.data.view(2, 2).t()
        other.data.t_()  # of another tensor in the same memory
        parameter.set_(torch.ones(2, device="xla"))
    assert parameter.tolist() == [1, 1] and parameter.shape == (2,)
    assert other.tolist() == [[7, 4], [2, 6]]
    kept = pickle.loads(pickle.dumps(parameter))
    assert kept.device == parameter.device and kept.tolist() == [1, 1]
    assert copy.deepcopy(parameter).tolist() == [1, 1]


def test_memory_that_a_parameter_had_is_released():
    parameter = nn.Parameter(torch.zeros(4))
    parameter.data = torch.ones(1000, device="xla")
    torch_xla.sync()
    storage = StorageWeakRef(parameter.untyped_storage())
    assert not storage.expired()
    parameter.data = torch.zeros(2)
    assert storage.expired()


class Claims(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return NotImplemented


def test_data_of_what_only_claims_to_be_there_is_refused():
    parameter = nn.Parameter(torch.zeros(2))
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        parameter.data = torch.Tensor._make_wrapper_subclass(Claims, (2,), device="xla")
    parameter.data = parameter.data.to("xla")
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        parameter.data = torch.ones(2).to_sparse()


def test_programs_without_xla_see_the_default():
    switch = torch.__future__.get_swap_module_params_on_conversion()
    assert not switch
    model = nn.Linear(3, 2)
    weight, held = model.weight, weakref.ref(model.weight)
    model.to(torch.float64)
    assert model.weight is weight is held() and weight.dtype == torch.float64
    model.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.ones(2)})
    assert model.weight is weight
    model.to("meta")
    assert model.weight is not weight


def test_loading_a_state_dict_writes_into_the_parameters():
    model = nn.Linear(3, 2).to("xla")
    weight = model.weight
    model.load_state_dict({"weight": torch.full((2, 3), 2.0), "bias": torch.ones(2)})
    assert model.weight is weight
    assert weight.cpu().eq(2).all()


def test_cpu_memory_of_moved_parameters_is_released():
    model = nn.Linear(3, 2)
    storage = model.weight.untyped_storage()
    released = weakref.ref(storage)
    del storage
    model.to("xla")
    gc.collect()
    assert released() is None


def test_momentum_starts_as_zeros_so_that_one_graph_is_enough(compiles):
    def run(device):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
        data = torch.randn(4, 6, 4)
        torch_xla.sync()
        for x in data:
            x = x.to(device)
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch_xla.sync()
        return [p.detach().cpu() for p in model.parameters()]

    expected = run("cpu")
    with compiles(1):
        actual = run("xla")
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_dampened_momentum_keeps_its_first_step():
    def run(device):
        weight = nn.Parameter(torch.ones(3, device=device))
        optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9, dampening=0.5)
        for _ in range(3):
            weight.grad = torch.full((3,), 2.0, device=device)
            optimizer.step()
        return weight.detach().cpu()

    torch.testing.assert_close(run("xla"), run("cpu"))
