"""CTC loss: as on CPU in all its forms, in one graph, and other lengths compile nothing."""

from __future__ import annotations

import pytest
import torch
from agreement import refused_alike
from torch.nn.functional import ctc_loss

import torch_xla
from torch_xla.debug import metrics as met

STEPS, BATCH, LABELS, WIDTH = 20, 3, 7, 5
INPUTS, LENGTHS = [20, 9, 3], [5, 2, 4]  # the last is impossible


def logits(seed=0):
    return torch.randn(STEPS, BATCH, LABELS, generator=torch.Generator().manual_seed(seed))


def labels(flat=False, lengths=LENGTHS):
    rows = torch.randint(1, LABELS, (BATCH, WIDTH), generator=torch.Generator().manual_seed(1))
    return torch.cat([row[:n] for row, n in zip(rows, lengths, strict=True)]) if flat else rows


FORMS = {
    "numbers": (lambda device: INPUTS, lambda device: LENGTHS),
    "tensors on the host": (lambda device: torch.tensor(INPUTS), lambda device: torch.tensor(LENGTHS).int()),
    "tensors on the device": tuple(lambda device, x=x: torch.tensor(x, device=device) for x in (INPUTS, LENGTHS)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("flat", [False, True], ids=["rows", "one after another"])
@pytest.mark.parametrize(("reduction", "zero_infinity"), [("none", False), ("mean", True)])
def test_as_on_cpu(form, flat, reduction, zero_infinity):
    results = []
    for device in ("cpu", "xla"):
        x = logits().to(device).requires_grad_()
        given = [make(device) for make in FORMS[form]]
        met.clear_counters()
        loss = ctc_loss(
            x.log_softmax(-1), labels(flat).to(device), *given, reduction=reduction, zero_infinity=zero_infinity
        )
        loss.sum().backward()
        assert not met.executed_fallback_ops()
        results.append((loss.detach().cpu(), x.grad.cpu()))
    assert results[0][0].dim() == (reduction == "none")
    torch.testing.assert_close(*reversed(results), rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.by_default("new graphs run op by op, with PyTorch's kernel in place of a program for each length")
def test_no_program_of_its_own(counted):
    with counted("OperatorsByRule", 0):
        test_as_on_cpu("tensors on the device", False, "mean", True)


@pytest.mark.parametrize("make", [lambda n: (n,), lambda n: torch.tensor(n), lambda n: torch.tensor(n, device="xla")])
def test_one_sequence(make):
    x, target = logits()[:, 0].log_softmax(-1), labels()[0]
    expected = ctc_loss(x, target, (STEPS,), (WIDTH,), blank=0, reduction="none")
    assert expected.dim() == 0
    ours = ctc_loss(x.to("xla"), target.to("xla"), make(STEPS), make(WIDTH), blank=0, reduction="none")
    torch.testing.assert_close(ours.cpu(), expected)


def test_no_labels_and_another_blank():
    x = logits().double().log_softmax(-1)
    for target, lengths in ((torch.zeros(BATCH, 0).long(), [0] * BATCH), (torch.zeros(0).long(), [0] * BATCH)):
        expected = ctc_loss(x, target, INPUTS, lengths, blank=LABELS - 1)
        result = ctc_loss(x.to("xla"), target.to("xla"), INPUTS, lengths, blank=LABELS - 1)
        torch.testing.assert_close(result.cpu(), expected)


def test_more_labels_than_steps_are_impossible():
    x, target = logits().log_softmax(-1).to("xla"), torch.arange(1, 7).repeat(10).to("xla")
    inputs, lengths = torch.tensor(INPUTS, device="xla"), torch.tensor([30, 10, 20], device="xla")
    for given in (INPUTS, [30, 10, 20]), (inputs, lengths):
        assert ctc_loss(x, target, *given, reduction="none").isinf().tolist() == [True, True, True]


@pytest.mark.parametrize("form", ["numbers", "host", "device", "one after another", "all on the host"])
def test_other_lengths_compile_nothing(form, compiles):
    layer = torch.nn.Linear(LABELS, LABELS).to("xla")

    def step(i):
        lengths, inputs = [1 + i % WIDTH, 3, WIDTH - i % 3], [STEPS - i, STEPS, 10 + i]
        target = labels(flat="all" in form or "another" in form, lengths=lengths)
        if form != "numbers":
            lengths, inputs = torch.tensor(lengths), torch.tensor(inputs)
        if form in ("device", "one after another"):
            lengths, inputs = lengths.to("xla"), inputs.to("xla")
        target = target if form == "all on the host" else target.to("xla")
        loss = ctc_loss(layer(logits(i).to("xla")).log_softmax(-1), target, inputs, lengths)
        layer.zero_grad()
        loss.backward()
        torch_xla.sync()
        return loss

    step(0)
    with compiles(0):
        losses = [step(i) for i in range(1, 6)]
    assert torch.stack(losses).isfinite().all()


WRONG = {
    "too long an input": lambda x, t: ctc_loss(x, t, [21, 9, 3], LENGTHS),
    "too long a target": lambda x, t: ctc_loss(x, t, INPUTS, torch.tensor([6, 1, 1])),
    "a negative length": lambda x, t: ctc_loss(x, t, INPUTS, [-1, 1, 1]),
    "too few lengths": lambda x, t: ctc_loss(x, t, INPUTS[:2], LENGTHS),
    "too few, as tensors": lambda x, t: ctc_loss(x, t, x.new_tensor(INPUTS).long(), x.new_tensor(LENGTHS[:2]).long()),
    "no such blank": lambda x, t: ctc_loss(x, t, INPUTS, LENGTHS, blank=LABELS),
    "rows of another batch": lambda x, t: ctc_loss(x, t[:2], INPUTS, LENGTHS),
    "labels that do not add up": lambda x, t: ctc_loss(x, t.reshape(-1), INPUTS, LENGTHS),
    "lengths of another type": lambda x, t: ctc_loss(x, t, torch.tensor(INPUTS), torch.tensor(LENGTHS).float()),
    "integers": lambda x, t: ctc_loss(x.long(), t, INPUTS, LENGTHS),
    "four dimensions": lambda x, t: ctc_loss(x.unsqueeze(0), t, INPUTS, LENGTHS),
    "nothing": lambda x, t: ctc_loss(x[:0], t, INPUTS, LENGTHS),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_refused_as_on_cpu(call):
    refused_alike(lambda device: call(logits().to(device), labels().to(device)), first_line=True)


def test_autocast_and_second_derivatives():
    x = logits().to("xla").requires_grad_()
    with torch.autocast("xla", torch.bfloat16):
        loss = ctc_loss(x.bfloat16().log_softmax(-1), labels().to("xla"), INPUTS, LENGTHS, zero_infinity=True)
    assert loss.dtype == torch.float32
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="derivative for aten::_ctc_loss_backward is not implemented"):
        slope.sum().backward()
    with torch.inference_mode():
        assert ctc_loss(x.log_softmax(-1), labels().to("xla"), INPUTS, LENGTHS).isinf().item()


def test_within_functorch():
    def loss(x, target):
        return ctc_loss(x.log_softmax(-1), target, INPUTS, [5, 2, 1], reduction="sum")

    expected = torch.func.grad(loss)(logits(), labels())
    torch.testing.assert_close(torch.func.grad(loss)(logits().to("xla"), labels().to("xla")).cpu(), expected)
