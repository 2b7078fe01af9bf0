"""One call of an overload, or one gradient of it: how it is made, and what the CPU does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from opdb import tolerances
from opdb.compare import Outcome, attempt
from opdb.samples import copy, tensors_of
from opdb.schema_inputs import Call, Spec, invoke, make, overload, written

_GRADIENTS = 5  # calls of an overload that are differentiated, each by one argument
_DIFFERENTIABLE = (torch.float32, torch.float64, torch.complex64)


@dataclass
class Case:
    """A call, or one gradient of it.

    Attributes:
        call: Its arguments.
        leaf: Which of its tensors needs a gradient, or -1.
        want: What the CPU did.
        compared: A key of `tolerances.LOOSE_KINDS`, or empty.
        cotangents: Of a gradient.
    """

    call: Call
    leaf: int
    want: Outcome
    compared: str = ""
    cotangents: list[torch.Tensor] = field(default_factory=list)


def cases_of(name: str, accepted: list[Call]) -> list[Case]:
    """The calls, and gradients of them by one tensor at a time where the CPU gives one or refuses."""
    cases: list[Case] = []
    differentiated = 0
    for call in accepted:
        case = Case(call, -1, Outcome())
        _expect(name, case)
        cases.append(case)
        tensors = list(specs(call))
        for leaf, spec in enumerate(tensors):
            if spec.dtype in _DIFFERENTIABLE and differentiated < _GRADIENTS:
                case = Case(call, leaf, Outcome())
                _expect(name, case)
                if case.want.error is not None or case.cotangents:
                    differentiated += 1
                    cases.append(case)
                    if case.want.error is not None and "out=" in str(case.want.error):
                        break
    return cases


def specs(value: Any) -> list[Spec]:
    """The tensors of a call."""
    if isinstance(value, Spec):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [s for v in value for s in specs(v)] if isinstance(value, list) else []


def _expect(name: str, case: Case) -> None:
    """Runs a call on the CPU, the second time with memory that nobody has written full of NaN and the like."""
    outcomes = []
    for filled in (False, True):
        torch.use_deterministic_algorithms(filled, warn_only=True)
        torch.manual_seed(0)
        before = torch.random.get_rng_state()
        arguments = arguments_on(name, case, "cpu")
        generators = [v for v in arguments.values() if isinstance(v, torch.Generator)]
        states = [g.get_state() for g in generators]
        cotangents: list[torch.Tensor] = []
        outcome = attempt(lambda a=arguments, c=cotangents: apply(name, case, a, c, True))
        outcomes.append(outcome)
        if not torch.equal(before, torch.random.get_rng_state()) or not all(
            torch.equal(s, g.get_state()) for s, g in zip(states, generators, strict=True)
        ):
            case.compared = "random"
        if outcome.error is not None or not filled:
            case.want, case.cotangents = outcome, cotangents
        if outcome.error is not None:
            break
    torch.use_deterministic_algorithms(False)
    case.want = Outcome(_plain(case.want.value), case.want.error)
    if outcome.error is None and not case.compared and _unwritten(*outcomes):
        case.compared = "uninitialized"


def _plain(value: Any) -> Any:
    """A copy to be sent to another process, which conjugated and negated views do not survive."""
    if isinstance(value, torch.Tensor):
        return value.detach().resolve_conj().resolve_neg().clone() if value.layout == torch.strided else value
    return type(value)(map(_plain, value)) if isinstance(value, (tuple, list)) else value


def _unwritten(plain: Outcome, filled: Outcome) -> bool:
    """Whether a result has elements that are what memory was filled with."""
    for a, b in zip(tensors_of(plain.value), tensors_of(filled.value), strict=True):
        if a.shape != b.shape or a.layout != torch.strided or a.is_quantized:
            continue
        if b.is_floating_point() or b.is_complex():
            if bool((b.isnan() & ~a.isnan()).any()):
                return True
        elif not torch.equal(a, b) and bool((b == (True if b.dtype == torch.bool else torch.iinfo(b.dtype).max)).any()):
            return True
    return False


def arguments_on(name: str, case: Case, device: str, host: str | None = None) -> Call:
    """A copy of a call's arguments on a device, that of one name on the CPU."""
    made = make(case.call, name)
    arguments = copy(made, device)
    if host is not None:
        arguments[host] = made[host]
    elsewhere = arguments.get("device", device) is None and not specs(case.call)  # on the default device
    if device != "cpu" and not elsewhere:
        for key, value in arguments.items():
            if isinstance(value, torch.Generator):
                arguments[key] = torch.Generator(device).manual_seed(5)
    return arguments


def apply(name: str, case: Case, arguments: Call, cotangents: list[torch.Tensor], draw: bool) -> Any:
    """What a call gives, what is in its arguments afterwards, and which of these its results share memory with."""
    op = overload(name)
    leaves = list(tensors_of(arguments))
    if case.leaf >= 0:
        leaf = leaves[case.leaf].requires_grad_()
        changed = set(written(op))
        if any(leaf is t for k, v in arguments.items() if k in changed for t in tensors_of(v)) and not any(
            a.is_out for a in op._schema.arguments
        ):
            arguments = {k: _replaced(v, leaf, leaf.clone()) for k, v in arguments.items()}
    results = invoke(op, arguments)
    if case.leaf < 0:
        return results, leaves, [_shares(r, leaves) for r in tensors_of(results)]
    given = results
    if loose(name) == "gauge":
        given = [r.abs() for r in tensors_of(results)]
    outputs = [r for r in tensors_of(given) if r.requires_grad and (r.is_floating_point() or r.is_complex())]
    if draw:
        generator = torch.Generator().manual_seed(1)
        cotangents += [torch.randn(r.shape, dtype=r.dtype, generator=generator) for r in outputs]
    if len(outputs) != len(cotangents):
        raise AssertionError(f"{len(outputs)} results can be differentiated, on the CPU {len(cotangents)}")
    there = [c.to(r.device) for c, r in zip(cotangents, outputs, strict=True)]
    return torch.autograd.grad(outputs, leaf, there, allow_unused=True) if outputs else ()


def _replaced(value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    if isinstance(value, list):
        return [_replaced(v, old, new) for v in value]
    return new if value is old else value


def _shares(result: torch.Tensor, arguments: list[torch.Tensor]) -> int:
    """Index of the argument that a result shares memory with, or -1."""
    memory = [
        t.untyped_storage()._cdata if t.layout == torch.strided and not t.is_meta else None
        for t in (result, *arguments)
    ]
    return memory.index(memory[0], 1) - 1 if memory[0] in memory[1:] and memory[0] is not None else -1


def label(name: str) -> str:
    """The operator database's name of an overload's operator, for the tables of tolerances."""
    base = name.split(".")[1]
    base = base if base.startswith("__") else base.strip("_")
    base = base.removesuffix("_copy")
    for prefix in ("linalg_", "fft_", "special_"):
        if base.startswith(prefix):
            return prefix[:-1] + "." + base.removeprefix(prefix)
    return base


def loose(name: str) -> str:
    return tolerances.loose(label(name))
