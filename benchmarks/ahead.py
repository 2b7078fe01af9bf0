"""Compiling what is recorded here for TPUs that are not here: package ``libtpu`` has their compiler."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch


def available() -> bool:
    """Whether that package is installed."""
    return importlib.util.find_spec("libtpu") is not None


@functools.cache
def chips(topology: str = "v5e:2x4") -> tuple[Any, ...]:
    """The chips of a topology; with them its compiler is loaded, which takes a second."""
    import jax
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # this is no machine of a pod, whose server could be asked
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # each process would have the chips for itself
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    jax.devices()  # has read its flags then; that compiler ends the process where one of them is for CPUs
    os.environ.pop("XLA_FLAGS", None)
    return tuple(topologies.get_topology_desc(topology, platform="tpu").devices)


@contextmanager
def standing_in(devices: Sequence[Any]) -> Iterator[None]:
    """A scope in which programs are lowered and compiled for other devices than those that there are."""
    from torch_xla._core.device import client, placement, shardings

    own = placement.of(0)
    devices = tuple(devices) if own.mesh else tuple(devices[:1])
    sharding = shardings.sharding(None, devices) if own.mesh else _alone(devices[0])
    there = replace(own, devices=devices, local=devices, sharding=sharding)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(placement, "of", lambda index: there))
        stack.enter_context(mock.patch.object(client, "is_own_cpu", lambda: False))
        stack.enter_context(mock.patch.object(client, "has_callbacks", _no_callbacks))
        yield


def _no_callbacks() -> bool:  # XLA for TPUs compiles such a program only where it runs
    return False


def _alone(device: Any) -> Any:
    import jax

    return jax.sharding.SingleDeviceSharding(device)


def lowered(devices: Sequence[Any], tensors: Sequence[torch.Tensor] | None = None) -> Any:
    """What is pending, or what some tensors need, as a program for other devices; `compiled` takes it.

    Args:
        devices: The devices, of which a program without a mesh takes the first.
        tensors: The tensors; None for all that is pending on ``xla:0``.
    """
    from torch_xla import _bindings
    from torch_xla._core.compile import compiler
    from torch_xla._core.graph import graph
    from torch_xla._core.lower import numbers, rolling

    def attempt() -> Any:
        cuts = _bindings.Cut
        what = cuts.of_device(0) if tensors is None else cuts.of_tensors(list(tensors))
        cut = what.preview()
        return compiler.lower(rolling.decide(cut) or graph.describe(cut), "step")

    with standing_in(devices):
        return numbers.with_constants(attempt).stage, compiler._options_for(0)


def compiled(program: Any) -> Any:
    """Compiles what `lowered` gave; its memory, code and text can be read."""
    from torch_xla._core.device import client

    stage, options = program
    with client.x64():
        return stage.compile(compiler_options=options)
