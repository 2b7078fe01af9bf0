"""Modules that move keep their parameters, ties and optimizers; where that cannot be, the optimizer says so."""

import gc
import weakref

import pytest
import torch
from torch import nn

import torch_xla
from torch_xla._errors import LeftBehindError


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
    with pytest.raises(RuntimeError, match="poisoned by swap_tensors"):
        reference.sum().backward()


def test_a_parameter_that_cannot_be_kept_is_reported_at_the_first_step():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    other = nn.Linear(1, 1)
    held = weakref.ref(model.weight)
    model.to("xla")
    assert model.weight is not held()
    with pytest.raises(LeftBehindError, match=r"left behind on cpu.*build the optimizer after \.to\('xla'\)"):
        optimizer.step()
    with pytest.raises(LeftBehindError):
        optimizer.step()
    torch.optim.SGD(model.parameters(), 0.1).step()
    torch.optim.SGD(other.parameters(), 0.1).step()


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
