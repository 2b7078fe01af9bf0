"""Recurrent layers: values and gradients of the CPU, one operator each way, a program no sequence lengthens."""

from __future__ import annotations

import copy
import re
from functools import partial

import pytest
import torch
from agreement import on_both
from torch import nn
from torch.nn.utils import rnn as packing

import torch_xla
from torch_xla import _XLAC

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

T, B, I, H = 7, 3, 4, 5  # noqa: E741
KINDS = {
    "lstm": lambda **k: nn.LSTM(I, H, **k),
    "lstm_proj": lambda **k: nn.LSTM(I, H, proj_size=3, **k),
    "gru": lambda **k: nn.GRU(I, H, **k),
    "tanh": lambda **k: nn.RNN(I, H, nonlinearity="tanh", **k),
    "relu": lambda **k: nn.RNN(I, H, nonlinearity="relu", **k),
}
# Layers, both directions, batch first, biases: every pair of choices occurs.
OPTIONS = [(1, False, False, True), (2, True, True, True), (1, True, False, False), (3, False, True, False)]


def layer(kind, layers=1, bidirectional=False, batch_first=False, bias=True, **kwargs):
    return KINDS[kind](num_layers=layers, bidirectional=bidirectional, batch_first=batch_first, bias=bias, **kwargs)


def states(net, batch=B):
    cells = net.num_layers * (2 if net.bidirectional else 1)
    hidden = torch.randn(cells, batch, net.proj_size or net.hidden_size)
    return (hidden, torch.randn(cells, batch, net.hidden_size)) if isinstance(net, nn.LSTM) else hidden


def flat(*values):
    return [
        t for v in values for t in (flat(*v) if isinstance(v, (tuple, list)) else [v]) if isinstance(t, torch.Tensor)
    ]


def results(net, x, state, device):
    """Outputs, states and all gradients, on the CPU."""
    net = copy.deepcopy(net).to(device)
    packed = isinstance(x, packing.PackedSequence)
    leaves = [t.detach().to(device).requires_grad_() for t in flat(x.data if packed else x, state)]
    data = x.to(device)._replace(data=leaves[0]) if packed else leaves[0]
    state = None if state is None else tuple(leaves[1:]) if isinstance(net, nn.LSTM) else leaves[1]
    out, last = net(data, state)
    outputs = flat(out.data if packed else out, last)
    weights = [torch.linspace(-1, 1, o.numel()).reshape(o.shape).to(device) for o in outputs]
    loss = sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))
    grads = torch.autograd.grad(loss, [*leaves, *net.parameters()])
    torch_xla.sync()  # one program, not one per tensor that is read
    return [t.detach().cpu() for t in (*outputs, *grads)], [tuple(o.stride()) for o in outputs]


def agree(net, x, state, **tolerance):
    (ours, strides), (theirs, expected) = results(net, x, state, "xla"), results(net, x, state, "cpu")
    torch.testing.assert_close(ours, theirs, **(tolerance or {"rtol": 1e-4, "atol": 1e-5}))
    assert strides == expected


CASES = [(kind, options) for kind in ("lstm", "gru") for options in OPTIONS]
CASES += [("lstm_proj", OPTIONS[1]), ("lstm_proj", OPTIONS[3]), ("tanh", OPTIONS[1]), ("relu", OPTIONS[0])]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_values_and_gradients(kind, options):
    net = layer(kind, *options)
    x = torch.randn(B, T, I) if net.batch_first else torch.randn(T, B, I)
    agree(net, x, states(net))


@pytest.mark.parametrize(("kind", "layers"), [("lstm_proj", 1), ("gru", 2), ("relu", 1)])
def test_packed_sequences(kind, layers):
    net = layer(kind, layers, bidirectional=True)
    x = packing.pack_sequence([torch.randn(n, I) for n in (2, 7, 4)], enforce_sorted=False)
    agree(net, x, states(net))


def test_without_states_and_without_a_batch():
    agree(layer("lstm"), torch.randn(T, B, I), None)
    net = layer("gru", 2, True)
    ours, _ = copy.deepcopy(net).to("xla")(x := torch.randn(T, I).to("xla"))
    torch.testing.assert_close(ours.cpu(), net(x.cpu())[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "dtype"), [("lstm", torch.float64), ("lstm", torch.bfloat16), ("gru", torch.float16)])
def test_other_types(kind, dtype):
    net = layer(kind).to(dtype)
    state = states(net)
    state = tuple(s.to(dtype) for s in state) if isinstance(state, tuple) else state.to(dtype)
    x = torch.randn(T, B, I, dtype=dtype)
    if dtype == torch.float64:
        agree(net, x, state, rtol=1e-9, atol=1e-9)
        return
    # The CPU rounds every intermediate; float32 says what a half type should come near.
    (ours, _), (theirs, _) = results(net, x, state, "xla"), results(net.float(), x.float(), _wide(state), "cpu")
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.float(), b, rtol=5e-2, atol=0.2 if dtype == torch.bfloat16 else 3e-2)


def _wide(state):
    return tuple(s.float() for s in state) if isinstance(state, tuple) else state.float()


@pytest.mark.parametrize(("kind", "layers"), [("lstm_proj", 1), ("gru", 2)])
@on_both(partial(torch.testing.assert_close, rtol=1e-8, atol=1e-8, check_device=False), compiled=True)
def test_second_derivatives(device, kind, layers):
    model = layer(kind, layers, True).double().to(device)
    x = torch.linspace(-1, 1, T * B * I, dtype=torch.float64).reshape(T, B, I).to(device).requires_grad_()
    out, _ = model(x)
    (slope,) = torch.autograd.grad((out**2).sum(), x, create_graph=True)
    return torch.autograd.grad((slope**2).sum(), [x, *model.parameters()])


def test_autocast_takes_the_lower_precision():
    net = layer("lstm").to("xla")
    with torch.autocast("xla", dtype=torch.bfloat16):
        out, (hidden, cell) = net(torch.randn(T, B, I, device="xla"))
    assert {out.dtype, hidden.dtype, cell.dtype} == {torch.bfloat16}
    out.sum().backward()
    assert net.weight_ih_l0.grad.dtype == torch.float32


def test_dropout_is_between_layers_and_the_backward_repeats_it():
    net = nn.RNN(1, 1, num_layers=2, nonlinearity="relu", bias=False, dropout=0.5).to("xla")
    with torch.no_grad():
        for p, v in zip(net.parameters(), (1.0, 0.0, 1.0, 0.0), strict=True):
            p.fill_(v)  # the layers pass their input on
    x = torch.ones(400, 5, 1, device="xla", requires_grad=True)
    out, _ = net(x)
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert abs(out.mean().item() - 1) < 0.15
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad.cpu(), out.detach().cpu())
    net.eval()
    assert net(x)[0].unique().tolist() == [1.0]


def test_gradients_of_some_inputs_only():
    net = layer("lstm").to("xla").requires_grad_(False)
    hidden, cell = (s.to("xla") for s in states(net))
    cell.requires_grad_()
    out, _ = net(torch.randn(T, B, I, device="xla"), (hidden, cell))
    out.sum().backward()
    assert cell.grad.abs().sum().item() > 0


def program(kind, steps):
    """Nodes and StableHLO of a training step."""
    net = layer(kind, 2, True).to("xla")
    net(torch.randn(steps, B, I, device="xla"))[0].sum().backward()
    tensors = [p.grad for p in net.parameters()]
    nodes = _XLAC._get_xla_tensors_text(tensors).count("= ")
    return nodes, _XLAC._get_stablehlo(tensors).count(b"\n")


@pytest.mark.parametrize("kind", KINDS)
def test_the_program_does_not_grow_with_the_sequence(kind):
    assert program(kind, 32) == program(kind, 512)


def test_one_operator_each_way_and_one_compile(compiles):
    net = layer("lstm", 2).to("xla")
    x = torch.randn(T, B, I, device="xla")
    torch_xla.sync()
    with compiles(1):
        for _ in range(3):
            net.zero_grad()
            net(x)[0].sum().backward()
            text = _XLAC._get_xla_tensors_text([p.grad for p in net.parameters()])
            assert text.count("torch_xla::rnn(") == 1 and text.count("torch_xla::rnn_backward(") == 1
            torch_xla.sync()


def test_what_is_not_whole_is_pytorchs_own():
    net = layer("gru")
    x, state = torch.randn(T, B, I), states(net)
    parameters = dict(net.named_parameters())

    def run(x, state, parameters):
        return torch.func.functional_call(net, parameters, (x, state))[0].sum()

    theirs = torch.func.grad(run)(x, state, parameters)
    ours = torch.func.grad(run)(x.to("xla"), state.to("xla"), {k: v.to("xla") for k, v in parameters.items()})
    torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)


def test_errors_are_those_of_the_cpu():
    weights = [torch.randn(s) for s in ((4 * H, I), (4 * H, H), (4 * H,), (4 * H,))]
    hidden = torch.randn(1, B, H)
    # In float64, as the CPU's fast path for float32 reads past a state of too few sequences.
    bad = [
        (torch.randn(T, B, I + 1), [hidden, hidden]),
        (torch.randn(T, B, I), [hidden]),
        (torch.randn(0, B, I), [hidden, hidden]),
        (torch.randn(T, B + 1, I), [hidden, hidden]),
    ]
    for x, state in bad:
        raised = []
        for device in ("cpu", "xla"):
            arguments = x.to(device).double(), *([t.to(device).double() for t in ts] for ts in (state, weights))
            with pytest.raises(RuntimeError) as error:
                torch.lstm(*arguments, True, 1, 0.0, True, False, False)
            raised.append(str(error.value))
        # A product of wrong shapes names all steps' rows on the CPU, one step's here.
        assert re.sub(r"\d+x5", "_x5", raised[0]) == re.sub(r"\d+x5", "_x5", raised[1])


def test_a_third_derivative_is_refused():
    net = layer("relu").to("xla")
    x = torch.randn(T, B, I, device="xla", requires_grad=True)
    value = net(x)[0].pow(2).sum()
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    value = slope.pow(2).sum()
    with pytest.raises(RuntimeError, match="third derivative"):
        torch.autograd.grad(value, x, create_graph=True)
