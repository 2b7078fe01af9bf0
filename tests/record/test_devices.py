"""Tensors of several devices in one call: PyTorch's error, or a number of the host's that is only read; never a copy
that is written in a tensor's place."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mixed_devices
import pytest
import torch
from hypothesis import settings
from probes import python

from opdb import schema_inputs
from torch_xla import _bindings

TWO = "Expected all tensors to be on the same device, but found at least two devices, xla:0 and"


def number(value: float = 1.0, device: str = "xla") -> torch.Tensor:
    return torch.tensor(value, device=device)


def test_a_number_of_the_host_is_not_written_with_a_value_of_the_device() -> None:
    kept = torch.tensor(5.0)
    with pytest.raises(RuntimeError, match=f"{TWO} cpu!"):
        kept += number()
    with pytest.raises(RuntimeError, match=f"{TWO} cpu!"):
        torch.add(number(), number(), out=kept)
    with pytest.raises(RuntimeError, match=f"{TWO} cpu!"):
        kept.bernoulli_(number())
    with pytest.raises(RuntimeError, match=f"{TWO} cpu!"):
        torch._foreach_add_([kept], [number()])
    assert kept.item() == 5.0


def test_a_flag_of_the_host_is_not_written() -> None:
    result, gradient = torch.tensor(0.0), torch.tensor([float("inf")], device="xla")
    with pytest.raises(RuntimeError, match=f"{TWO} cpu!"):
        torch._amp_foreach_non_finite_check_and_unscale_([gradient], result, number())


def test_a_number_of_the_host_is_read() -> None:
    x = torch.arange(3.0, device="xla")
    x += torch.tensor(1.0)
    assert x.tolist() == [1.0, 2.0, 3.0]
    assert (torch.tensor(2.0) * x).tolist() == [2.0, 4.0, 6.0]
    assert torch.add(torch.tensor(2.0), torch.tensor(3.0), out=number()).item() == 5.0


def test_the_number_of_a_fill_may_be_anywhere() -> None:
    for device, other in (("cpu", "xla"), ("xla", "xla:1"), ("xla", "cpu")):
        assert torch.zeros(2, device=device).fill_(number(3.0, other)).tolist() == [3.0, 3.0]
    with pytest.raises(RuntimeError, match="fill_ only supports 0-dimension value tensor"):
        torch.zeros(2).fill_(torch.ones(2, device="xla"))


@pytest.mark.parametrize(("one", "other"), [("cpu", "xla:0"), ("xla:0", "cpu"), ("xla:0", "xla:1")])
def test_a_tensor_does_not_take_the_storage_of_another_device(one: str, other: str) -> None:
    source = torch.zeros(2, device=other)
    for arguments in ((source,), (source.untyped_storage(),), (source.untyped_storage(), 0, (2,), (1,))):
        with pytest.raises(RuntimeError, match=f"device .*{one}.* to a storage on different device .*{other}"):
            torch.ones(2, device=one).set_(*arguments)
    assert not torch.zeros(2, device=one).is_set_to(source)


def test_an_index_is_on_the_host_or_on_the_device_itself() -> None:
    x = torch.arange(3.0, device="xla")
    assert x[torch.tensor([2, 0])].tolist() == [2.0, 0.0]
    words = "indices should be either on cpu or on the same device as the indexed tensor"
    with pytest.raises(RuntimeError, match=rf"{words} \(xla:0\)"):
        x[torch.tensor([2, 0], device="xla:1")]
    with pytest.raises(RuntimeError, match=rf"{words} \(xla:0\)"):
        x[torch.tensor([2, 0], device="xla:1")] = 1.0
    with pytest.raises(RuntimeError, match=rf"{words} \(cpu\)"):
        torch.arange(3.0)[torch.tensor([2, 0], device="xla")]


def test_a_wrapper_that_claims_to_be_on_the_device_is_refused() -> None:
    wrapped = torch._to_functional_tensor(torch.zeros(2, device="xla"))
    with pytest.raises(RuntimeError, match=r"\[tensor\] got a wrapper that claims to be on xla:0"):
        _bindings.tensor_id(wrapped)
    with pytest.raises(RuntimeError, match=r"\[tensor\] got a tensor on cpu, expected one on xla"):
        _bindings.storage_generation(torch.zeros(2))


def try_mixes(names: list[str], seed: int) -> set[str]:
    """Calls overloads with their tensors on several devices, in a process of its own; of which it made calls."""
    done = python(Path(mixed_devices.__file__), str(seed), *names, check=False, timeout=3600, imported=True)
    calls = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert not [call for call in calls if "wrong" in call]
    assert done.returncode == 0, f"{calls[-1:]} ended with {done.returncode}: {done.stderr[-500:]}"
    return {call["name"] for call in calls}


@pytest.mark.fuzz
def test_operators_on_mixed_devices() -> None:
    names = mixed_devices.overloads()
    chosen = settings.default
    seed = 5 if chosen.derandomize else random.randrange(2**32)
    print(f"seed {seed}")  # shown where the test fails
    names = random.Random(seed).sample(names, min(len(names), chosen.max_examples // 3))
    assert len(try_mixes(names, seed)) > len(names) // 4  # of the others no call on the CPU was found


def _calls_with_a_device() -> Iterator[tuple[str, dict[str, Any]]]:
    """A call that the CPU accepts of each overload with an argument for the device of its result."""
    for name in schema_inputs.names():
        op = schema_inputs.overload(name)
        if not any(a.name == "device" for a in op._schema.arguments):
            continue
        for shape in ((3,), (2, 3), ()):
            arguments = schema_inputs.Arguments(op)
            try:
                call = schema_inputs.make(arguments.fixed(shape, torch.float32), name) | {"device": torch.device("cpu")}
                result = schema_inputs.invoke(op, call)
            except Exception:  # of other shapes, or of a type that has no choices
                continue
            if isinstance(result, torch.Tensor) and result.layout == torch.strided and not result.is_nested:
                yield name, call
                break


@pytest.mark.filterwarnings("ignore")
def test_a_result_is_on_the_device_that_is_asked_for() -> None:
    """By its index, else on the current one; and one that is not there is refused."""
    made = 0
    try:
        _bindings.set_current_device(1)
        for name, call in _calls_with_a_device():
            op = schema_inputs.overload(name)
            given = {k: v.to("xla:0") if isinstance(v, torch.Tensor) else v for k, v in call.items()}
            for device, expected in (("xla:0", "xla:0"), ("xla", "xla:1"), ("cpu", "cpu")):
                try:
                    result = schema_inputs.invoke(op, given | {"device": torch.device(device)})
                except (NotImplementedError, RuntimeError) as error:
                    assert "pin" in str(error) or "not implemented" in str(error).lower(), name
                    break
                assert str(result.device) == expected, name
                made += 1
            with pytest.raises(RuntimeError, match="available are xla:0|pin"):
                schema_inputs.invoke(op, given | {"device": torch.device("xla:77")})
    finally:
        _bindings.set_current_device(0)
    assert made > 150
