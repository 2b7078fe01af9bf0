"""Describes shardings of buffers over a mesh, ``{devices=[2,1]0,1}`` by rows, and numbers them for the recorder.

All of a program are over one mesh: the user's, where the program has shardings over that one alone, else one whose axes
have prime lengths. XLA then sees axes of one mesh, whichever a caller uses, and recognizes a sharding that it chose
itself. Buffers are over the latter, or over a mesh of their own where it has no axes that they are along.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_xla._config import within
from torch_xla._errors import message

if TYPE_CHECKING:
    import jax

# Placement numbers that csrc/ir/node.h has too: replicated by default, left to the compiler, and replicated because
# XLA or the user chose that.
REPLICATED, UNSPECIFIED, EXPLICITLY_REPLICATED = 0, 1, 2
MANUAL = 3  # the tensor is one device's shard, the buffer has all, its first dimension is the devices
_FIRST = 16


@dataclass(frozen=True)
class TileAssignment:
    """A sharding by tiles, as XLA's `TileAssignment`: ``((2, 1), (0, 1))`` has the rows on two devices."""

    tiles: tuple[int, ...]  # how many tiles each dimension has
    order: tuple[int, ...]  # the devices, by tile in row-major order; those with copies of one tile are neighbours

    @property
    def copies(self) -> int:
        """How many devices have the same tile."""
        return len(self.order) // math.prod(self.tiles)

    @property
    def is_replicated(self) -> bool:
        """Whether each device has all of the tensor."""
        return math.prod(self.tiles) == 1

    def __str__(self) -> str:
        """The sharding in XLA's notation."""
        if self.is_replicated:
            return "{replicated}"
        dims = [*self.tiles, self.copies] if self.copies > 1 else self.tiles
        kind = " last_tile_dim_replicate" if self.copies > 1 else ""
        return f"{{devices=[{','.join(map(str, dims))}]{','.join(map(str, self.order))}{kind}}}"

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the dimensions divide."""
        return all(size % tiles == 0 for size, tiles in zip(shape, self.tiles, strict=True))

    def on_buffer(self, shape: Sequence[int]) -> TileAssignment:
        """The sharding of a buffer of a shape: without dimensions that do not divide, for which JAX has none."""
        if self.fits(shape):
            return self
        keep = [size % tiles == 0 for size, tiles in zip(shape, self.tiles, strict=True)]
        return _without_dims(self, tuple(keep))

    def indices(self, shape: Sequence[int]) -> list[tuple[int, tuple[slice, ...], int]]:
        """Per device, in their order: the device, the slices of a shape that it has, and which of the copies this is.

        Tiles are of equal size but for the last ones, which may have less, or nothing.
        """
        entries = []
        for at, device in enumerate(self.order):
            tile, copy = divmod(at, self.copies)
            entries.append((device, _slices(tile, self.tiles, shape), copy))
        return sorted(entries)


def _slices(tile: int, tiles: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    slices = []
    for size, count in zip(reversed(shape), reversed(tiles), strict=True):
        tile, place = divmod(tile, count)
        length = -(-size // count)
        slices.append(slice(min(place * length, size), min((place + 1) * length, size), 1))
    return tuple(reversed(slices))


def tile_assignment(tiles: Sequence[int], order: Sequence[int]) -> TileAssignment:
    """The sharding in its canonical form: copies of a tile are in ascending order."""
    copies = len(order) // math.prod(tiles)
    grouped = [sorted(order[i : i + copies]) for i in range(0, len(order), copies)]
    return TileAssignment(tuple(tiles), tuple(device for group in grouped for device in group))


@functools.lru_cache(maxsize=4096)
def _without_dims(sharded: TileAssignment, keep: tuple[bool, ...]) -> TileAssignment:
    import numpy as np

    devices = np.array(sharded.order).reshape(*sharded.tiles, sharded.copies)
    kept_dims = [i for i, keeps in enumerate(keep) if keeps]
    dropped = [i for i, keeps in enumerate(keep) if not keeps]
    moved = devices.transpose(*kept_dims, *dropped, len(keep)).reshape(-1)
    tiles = [count if keeps else 1 for count, keeps in zip(sharded.tiles, keep, strict=True)]
    return tile_assignment(tiles, moved.tolist())


@dataclass(frozen=True)
class Axes:
    """The axes of a mesh."""

    lengths: tuple[int, ...]
    names: tuple[str, ...]
    order: tuple[int, ...] = ()  # of its devices, where that is not by number

    def of(self, tiling: TileAssignment) -> tuple[tuple[int, ...], ...] | None:
        """Those that each dimension is sharded over; None if it is not along them."""
        if self.order:
            place = {device: i for i, device in enumerate(self.order)}
            tiling = tile_assignment(tiling.tiles, [place[device] for device in tiling.order])
        return axes_of(tiling, self.lengths)


_by_number: dict[int, TileAssignment] = {}
_numbered: set[TileAssignment] = set()
_users: dict[TileAssignment, dict[Axes, None]] = {}  # meshes that each was asked for on
_meshes: set[Axes] = set()
_changes = 0
_of_program: ContextVar[Axes | None] = ContextVar("the axes of the program's mesh", default=None)


def note(tiling: TileAssignment, axes: Axes) -> None:
    """Says that a user asked for a sharding over a mesh with these axes."""
    global _changes
    if axes not in _meshes:  # perhaps no longer the only one
        _meshes.add(axes)
        _changes += 1
    meshes = _users.setdefault(tiling, {})
    if axes not in meshes:
        meshes[axes] = None
        _changes += tiling in _numbered  # else no program has it


def changes() -> int:
    """How often `axes_for` may have come to give something else: programs from before may have another mesh."""
    return _changes


def noted() -> str:
    """What `axes_for` depends on, as text."""
    return str(sorted((str(tiling), list(map(str, meshes))) for tiling, meshes in _users.items()))


def axes_for(numbers: Iterable[int]) -> Axes | None:
    """The axes of the one mesh that users asked for these placement numbers on; None where there are several, or none.

    Where they asked for none of them it is their only mesh. Those that XLA chose have to be along it.
    """
    tilings = {_by_number[number] for number in numbers if number >= _FIRST}
    asked = [set(_users[tiling]) for tiling in tilings if tiling in _users]
    common = set.intersection(*asked) if asked else {*_meshes}
    axes = common.pop() if len(common) == 1 else None
    return None if axes is None or any(axes.of(tiling) is None for tiling in tilings) else axes


def within_program(axes: Axes | None) -> AbstractContextManager[None]:
    """A scope in which `sharding` is over a mesh with these axes; None for those of prime lengths."""
    return within(_of_program, axes)


@functools.lru_cache(maxsize=4096)
def number_of(tiling: TileAssignment) -> int:
    """The placement number of a sharding; the same in every process."""
    if tiling.is_replicated:
        return EXPLICITLY_REPLICATED
    _numbered.add(tiling)
    digest = hashlib.blake2b(str(tiling).encode(), digest_size=4).digest()
    number = max(int.from_bytes(digest, "little") >> 1, _FIRST)
    while _by_number.setdefault(number, tiling) != tiling:
        number += 1
    return number


def by_number(number: int) -> TileAssignment | None:
    """The sharding with a placement number; None where it is replicated."""
    return _by_number[number] if number >= _FIRST else None


def same(one: int, other: int) -> bool:
    """Whether buffers with these placement numbers surely have the same sharding."""
    replicated = (REPLICATED, EXPLICITLY_REPLICATED)
    return (one == other and one != UNSPECIFIED) or (one in replicated and other in replicated)


def text_of(number: int) -> str:
    """A placement number in XLA's notation, empty if nobody chose it."""
    if number in (REPLICATED, UNSPECIFIED):
        return ""
    if number == MANUAL:
        return "{manual}"
    tiling = by_number(number)
    return "{replicated}" if tiling is None else str(tiling)


def of_xla(proto: Any, rank: int) -> int:
    """The placement number of a sharding that XLA chose, from an executable, of a tensor with `rank` dimensions."""
    from torch_xla._jax_internals import xla_client

    # From JAX 0.11 on a plugin's client may name the axes of a mesh, and has no tiles then.
    hlo_sharding = xla_client.HloSharding.from_proto(proto).v3_to_v2_sharding()
    if not hlo_sharding.is_tiled():
        return EXPLICITLY_REPLICATED
    if any(kind != xla_client.OpSharding.Type.REPLICATED for kind in hlo_sharding.subgroup_types()):
        raise RuntimeError(
            message(
                "spmd", f"got a result that XLA shards as {hlo_sharding}", expected="tiles or replicas", do="report it"
            )
        )
    tiles = list(hlo_sharding.tile_assignment_dimensions())[:rank]
    chosen = tile_assignment(tiles, list(hlo_sharding.tile_assignment_devices()))
    return EXPLICITLY_REPLICATED if chosen.is_replicated else number_of(chosen)


def prime_factors(count: int) -> list[int]:
    """The lengths of the axes of the mesh that no caller chose."""
    factors, divisor = [], 2
    while count > 1:
        while count % divisor == 0:
            factors.append(divisor)
            count //= divisor
        divisor += 1
    return factors


@functools.lru_cache(maxsize=4096)
def axes_of(tiling: TileAssignment, lengths: tuple[int, ...]) -> tuple[tuple[int, ...], ...] | None:
    """The axes of a mesh that each dimension is sharded over; None if it is not along such axes."""
    import numpy as np

    # An axis of one device has the stride of the next, and is never asked for.
    strides = [math.prod(lengths[i + 1 :]) if length > 1 else 0 for i, length in enumerate(lengths)]
    axes: list[int] = []
    step = 1
    while step < len(tiling.order):  # from the axis that changes fastest
        stride = tiling.order[step] - tiling.order[0]
        if stride not in strides or strides.index(stride) in axes:
            return None
        axes.insert(0, strides.index(stride))
        step *= lengths[axes[0]]
    every = [*axes, *(i for i, length in enumerate(lengths) if length == 1)]
    if not np.array_equal(np.arange(len(tiling.order)).reshape(lengths).transpose(every).reshape(-1), tiling.order):
        return None
    mesh_axes: list[tuple[int, ...]] = []
    for tiles in tiling.tiles:
        dimension_axes: list[int] = []
        while math.prod(lengths[axis] for axis in dimension_axes) < tiles:
            dimension_axes.append(axes.pop(0))
        if math.prod(lengths[axis] for axis in dimension_axes) != tiles:
            return None
        mesh_axes.append(tuple(dimension_axes))
    return tuple(mesh_axes)


def manual_sharding(devices: tuple[jax.Device, ...]) -> jax.sharding.NamedSharding:
    """JAX's sharding of an array whose first dimension is the devices."""
    import jax

    mesh = sharding(None, devices).mesh
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names))


def sharding(tiling: TileAssignment | None, devices: tuple[jax.Device, ...]) -> jax.sharding.NamedSharding:
    """JAX's form of a sharding; None is replicated."""
    return _sharding(tiling, devices, _of_program.get())


@functools.lru_cache(maxsize=4096)
def _sharding(tiling: TileAssignment | None, devices: tuple[jax.Device, ...], mesh_axes: Axes | None) -> Any:
    import jax
    import numpy as np

    array = np.array(devices, dtype=object)
    if mesh_axes is None:
        primes = tuple(prime_factors(len(devices))) or (1,)
        mesh_axes = Axes(primes, tuple(f"m{i}" for i in range(len(primes))))
    axes = () if tiling is None else mesh_axes.of(tiling)
    if axes is not None:
        mesh = jax.sharding.Mesh(array.reshape(mesh_axes.lengths), mesh_axes.names)
        spec = [tuple(mesh_axes.names[axis] for axis in dimension_axes) or None for dimension_axes in axes]
        order = mesh_axes.order or None
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec), _logical_device_ids=order)
    assert tiling is not None
    shape = [*tiling.tiles, tiling.copies]
    names = [f"d{i}" for i in range(len(shape))]
    mesh = jax.sharding.Mesh(array.reshape(shape), names)
    parts = [name if tiles > 1 else None for name, tiles in zip(names[:-1], tiling.tiles, strict=True)]
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*parts), _logical_device_ids=tiling.order)
