"""What is known of TPU chips: memory, peaks and bandwidths, each with its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_xla._errors import message

GIB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """One kind of chip, as a program sees it: figures are of one of its devices, of which a v7x has two a chip.

    Attributes:
        name: As in a topology's name, ``"v5e"``.
        compiler_name: As package libtpu calls it in a topology's name.
        dimensions: How many a topology of it has.
        memory: Bytes that programs may use; the compiler of libtpu 0.0.42 says so when one needs more.
        peak: Floating-point operations a second in products of bfloat16.
        peak_int8: Operations a second in products of int8, where it has more of them.
        bandwidth: Bytes a second from and to its memory.
        links: Bytes a second to its neighbours, of all links together, in both directions.
        source: The page that has the peaks and bandwidths.
        options: What libtpu has to be told, to describe slices as they are lent.
    """

    name: str
    compiler_name: str
    dimensions: int
    memory: float
    peak: float
    peak_int8: float
    bandwidth: float
    links: float
    source: str
    options: tuple[tuple[str, Any], ...] = ()


_DOCS = "https://docs.cloud.google.com/tpu/docs/"
CHIPS = (
    Chip("v4", "v4", 3, 30.75 * GIB, 275e12, 275e12, 1228e9, 600e9, _DOCS + "v4", (("chip_config_name", "megacore"),)),
    Chip("v5e", "v5e", 2, 15.75 * GIB, 197e12, 393e12, 819e9, 400e9, _DOCS + "v5e"),
    Chip("v5p", "v5p", 3, 95.74 * GIB, 459e12, 918e12, 2765e9, 1200e9, _DOCS + "v5p"),
    Chip("v6e", "v6e", 2, 31.25 * GIB, 918e12, 1836e12, 1638e9, 800e9, _DOCS + "v6e"),
    Chip("v7x", "tpu7x", 3, 94.75 * GIB, 1153.5e12, 1153.5e12, 3690e9, 600e9, _DOCS + "tpu7x"),
)


def find(topology: str) -> Chip:
    """The chip of a topology, such as ``"v5e:8x8"``; ValueError where there is none of that name."""
    name = topology.partition(":")[0].lower()
    for chip in CHIPS:
        if name in (chip.name, chip.compiler_name):
            return chip
    raise ValueError(
        message(
            "ahead",
            f"got topology {topology!r}",
            expected=f"a chip ({', '.join(chip.name for chip in CHIPS)}) and its numbers, such as v5e:4x4 or v5p:2x2x2",
            do="python -m torch_xla.ahead --topologies lists them",
        )
    )
