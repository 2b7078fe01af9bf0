"""What is saved on one device and loaded on another: forms of files × origins × destinations × kinds of tensors.

The oracle is the same program on the CPU: values, types, strides, attributes, and who shares memory with whom.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_storage import Wrapped
from torch import nn
from torch.distributed import checkpoint

ORIGINS = ["cpu", "xla", "xla:1"]


class Named(torch.Tensor):
    """A subclass whose memory is its own."""


def attributed(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    x.note = "kept"  # type: ignore[attr-defined]
    return x


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda x: x,
    "alias": lambda x: x.view(8),
    "slice": lambda x: x[1:3],
    "row": lambda x: x[2],
    "column": lambda x: x[:, 1],
    "element": lambda x: x[3, 1],
    "steps": lambda x: x[::2],
    "transposed": lambda x: x.t(),
    "empty": lambda x: x[2:2],
    "narrow": lambda x: x.narrow(0, 3, 1),
    "expanded": lambda x: x[:1].expand(3, 2),
    "overlapping": lambda x: x.as_strided((3, 3), (1, 2), 1),
    # PyTorch saves no memory as two types.
    "bits": lambda x: x.clone()[1:].view(torch.int32),
    "bytes": lambda x: x.clone().view(-1).view(torch.uint8)[:27],
}
KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "parameter": lambda x: nn.Parameter(x),
    "part": lambda x: nn.Parameter(x[1:3]),
    "frozen": lambda x: nn.Parameter(x[:, 0], requires_grad=False),
    "buffer": lambda x: nn.Buffer(x[1:3]),
    "leaf": lambda x: x[1:3].detach().requires_grad_(),
    "attribute": lambda x: attributed(x[1:3]),
    "subclass": lambda x: x[1:3].as_subclass(Named),
    "wrapper": lambda x: Wrapped(x[1:3]),
    "storage": lambda x: x.clone().untyped_storage(),
    "conjugate": lambda x: torch.view_as_complex(x.clone()).conj()[1:],
    "negative": lambda x: torch.view_as_complex(x.clone()).conj().imag,
    "list": lambda x: [x[1], (x[1], {"x": x[1:]})],
}


def values(device: str) -> dict[str, Any]:
    x = torch.arange(8.0, device=device).view(4, 2)
    made: dict[str, Any] = {name: make(x) for name, make in (VIEWS | KINDS).items()}
    return made | {"no memory": torch.empty(0, 3, device=device), "other": torch.ones(2, device=device)}


def saved_in(form: str, value: Any, folder: Path, weights_only: bool, place: Any) -> Any:
    file = folder / f"{len(list(folder.iterdir()))}.pt"
    torch.save(value, file, _use_new_zipfile_serialization=form != "legacy")
    source = io.BytesIO(file.read_bytes()) if form == "bytes" else file
    return torch.load(source, map_location=place, weights_only=weights_only, mmap=form == "mapped")


def describe(name: str, value: Any) -> Any:
    """What must be as on the CPU, except for the device."""
    if isinstance(value, torch.TypedStorage | torch.UntypedStorage):
        return getattr(value, "_untyped_storage", value).tolist()
    if isinstance(value, Wrapped):
        return Wrapped, describe(name, value.part)
    if not isinstance(value, torch.Tensor):
        return torch.utils._pytree.tree_map(lambda part: describe(name, part), value)
    layout = (value.dtype, tuple(value.shape), value.requires_grad, value.is_leaf, sorted(vars(value)))
    if name not in ("conjugate", "negative"):  # on xla they are views without bits, which are saved by themselves
        layout += (value.stride(), value.storage_offset(), value.untyped_storage().nbytes())
    return type(value), layout, value.detach().as_subclass(torch.Tensor).tolist()


def devices(value: Any) -> set[torch.device]:
    leaves = torch.utils._pytree.tree_leaves(value)
    return {leaf.device for leaf in leaves if isinstance(leaf, (torch.Tensor, torch.UntypedStorage))}


def by_name(storage: torch.UntypedStorage, location: str) -> Any:
    return torch.serialization.default_restore_location(storage, "xla:1")


PLACES: dict[str, Any] = {
    "none": None,
    "cpu": "cpu",
    "xla": "xla",
    "device": torch.device("xla", 1),
    "to the host": {"xla:0": "cpu", "xla:1": "cpu"},
    "to another": {"xla:0": "xla:1", "cpu": "xla:0", "xla:1": "xla:0"},
    "function": by_name,
    "as it is": lambda storage, location: storage,
}


def target(origin: str, place: Any) -> torch.device:
    if callable(place):
        return torch.device("xla:1" if place is by_name else "cpu")
    name = torch.empty(0, device=origin).device if place is None else place
    if isinstance(place, dict):
        name = place.get(str(torch.empty(0, device=origin).device), origin)
    return torch.empty(0, device=name).device


@pytest.mark.parametrize("weights_only", [True, False], ids=["weights", "objects"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("form", ["zip", "bytes", "mapped", "legacy"])
def test_files(form: str, origin: str, place: str, weights_only: bool, tmp_path: Path) -> None:
    def load(device: str, location: Any) -> Any:
        value = values(device)
        if weights_only or form == "legacy":
            del value["storage"]
        if callable(PLACES[place]) or (origin, place) == ("cpu", "to another"):
            del value["wrapper"]  # PyTorch has no place for it
        with torch.serialization.safe_globals([Wrapped, Named, nn.Buffer]):
            return saved_in(form, value, tmp_path, weights_only, location)

    made, expected = load(origin, PLACES[place]), load("cpu", None)
    assert devices(made) == {target(origin, PLACES[place])}
    for name in expected:
        assert describe(name, made[name]) == describe(name, expected[name]), name
    with torch.no_grad():  # who sees a write
        for value in (made, expected):
            value["slice"].mul_(3)
            value["part"].add_(100)
            value["attribute"].sub_(1)
            value["other"].zero_()
    for name in expected:
        assert describe(name, made[name]) == describe(name, expected[name]), name


def test_parts_of_a_storage_that_is_read_later():
    whole = torch.serialization.default_restore_location(torch.UntypedStorage(8, device="cpu"), "xla")
    part = whole[4:]
    whole.fill_(1)
    assert torch.empty(0, dtype=torch.uint8, device="xla").set_(part).tolist() == [1] * 4


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("target", ORIGINS)
def test_safetensors(origin: str, target: str, tmp_path: Path) -> None:
    def outcome(names: tuple[str, ...], device: str, target: str) -> Any:
        given, file = values(device), tmp_path / "x.safetensors"
        try:
            save_file({name: given[name] for name in names}, file)
        except (RuntimeError, ValueError) as error:
            return type(error), str(error)
        loaded = load_file(file, device=target)
        assert devices(loaded) == {torch.empty(0, device=target).device}
        return {name: describe("negative", tensor) for name, tensor in loaded.items()}

    names = [*VIEWS, "parameter", "part", "attribute", "no memory"]
    for together in [*((name,) for name in names), ("whole", "slice"), ("row", "column"), ("slice", "other")]:
        assert outcome(together, origin, target) == outcome(together, "cpu", "cpu"), together


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("target", ORIGINS)
def test_distributed_checkpoints(origin: str, target: str, tmp_path: Path) -> None:
    def state(device: str, scale: int) -> dict[str, Any]:
        made = values(device)
        with torch.no_grad():
            made["whole"].mul_(scale)
        # PyTorch itself loads into no elements that share memory, and reads no classes that it does not know.
        refused = ("expanded", "overlapping", "subclass", "wrapper")
        return {name: x for name, x in made.items() if isinstance(x, torch.Tensor) and name not in refused}

    def loaded(device: str, target: str) -> dict[str, Any]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        checkpoint.save(state(device, 3), checkpoint_id=folder, no_dist=True)
        made = state(target, 1)
        checkpoint.load(made, checkpoint_id=folder, no_dist=True)
        return made

    made, expected = loaded(origin, target), loaded("cpu", "cpu")
    for name in expected:
        assert describe(name, made[name]) == describe(name, expected[name]), name


def test_a_subclass_of_parts_in_the_old_format_as_others_save_it_is_refused():
    rebuild = torch._utils._rebuild_device_tensor_from_cpu_tensor
    host = Wrapped(torch.arange(3.0))

    class Saved:
        def __reduce__(self) -> Any:
            return rebuild, (host, torch.float32, "xla:0", False)

    file = io.BytesIO()
    torch.save(Saved(), file, _use_new_zipfile_serialization=False)
    file.seek(0)
    with pytest.raises(RuntimeError, match=r"\[load\] got a Wrapped in the format of PyTorch before 1.6"):
        torch.load(file, weights_only=False)
