"""The functions of the package's top level that deal with devices, barriers, seeds and processes."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch

from torch_xla import _bindings, _capture, _config, _metrics
from torch_xla._core.device import client
from torch_xla._core.execute import barrier as _barrier
from torch_xla._core.execute import step_closures
from torch_xla._core.report import debug_level
from torch_xla._errors import message

logger = logging.getLogger("torch_xla")

_ASKED = _config.Watch(_config.XLA_SYNC_WAIT, _config.XLA_METRICS_FILE)


def device(index: int | None = None) -> torch.device:
    """Returns an XLA device.

    Args:
        index: Index into `torch_xla.devices()`; that device also becomes the current one. By default the current
            device is returned, which is ``xla:0`` unless another was chosen.

    Returns:
        The device, always with its index: ``torch.device("xla", 0)``.

    Raises:
        IndexError: there is no such device.
    """
    if index is None:
        return torch.device("xla", _bindings.current_device())
    count = client.device_count()
    if not 0 <= index < count:
        raise IndexError(
            message("device", f"Device index {index} out of range", expected=f"0 to {count - 1}: {devices()}")
        )
    client.publish_count()  # a script may have set how many there are after the import
    _bindings.set_current_device(index)
    return torch.device("xla", index)


def devices() -> list[torch.device]:
    """All XLA devices of this process, ``xla:0`` first."""
    return [torch.device("xla", index) for index in range(client.device_count())]


def real_devices() -> list[str]:
    """Names of the hardware behind `torch_xla.devices()`, such as ``["CPU:0", "CPU:1"]``."""
    return [client.hardware(index) for index in range(client.device_count())]


def device_count() -> int:
    """Number of XLA devices of this process."""
    return client.device_count()


def sync(wait: bool = False, reset_scope: bool = True) -> None:
    """Compiles what was recorded so far, unless it is known already, and dispatches it to the devices.

    Afterwards the step closures that were added since the last barrier run. Without pending work and closures this is
    nearly free.

    Args:
        wait: Whether to return only when the devices have finished.
        reset_scope: Whether this ends a step, so that no block of ``xp.Trace`` may be open around it.

    Raises:
        RuntimeError: a graph could not be compiled or run; tensors then keep the values they had. Or a block of
            ``xp.Trace`` is open.
    """
    if reset_scope and _capture.blocks.names:
        name = f"{_capture.blocks.names[-1]}.{len(_capture.blocks.names)}"
        raise RuntimeError(
            message(
                "profiler",
                f"Expecting scope to be empty but it is {name}",
                do="end the xp.Trace before the barrier, or call sync(reset_scope=False)",
            )
        )
    barrier(debug_level.SYNC, wait)


def barrier(cause: str, wait: bool = False) -> None:
    """Runs `sync` for a cause of this package's own, which the analyses print."""
    _metrics.count("MarkStep")
    has_settings = _ASKED.any_set()
    _barrier.sync(None, wait or has_settings and _config.XLA_SYNC_WAIT.get(), cause)
    if has_settings and _config.XLA_METRICS_FILE.get() is not None:
        from torch_xla.debug import metrics_saver

        metrics_saver.at_barrier()
    if step_closures.queue:
        step_closures.run()


def manual_seed(seed: int, device: torch.device | str | int | None = None) -> None:
    """Seeds the random numbers of one XLA device.

    ``torch.manual_seed`` seeds all XLA devices too; this call wins until the next one of either.

    Args:
        seed: Any integer of 64 bits.
        device: The device; the current one by default.
    """
    index = index_of(torch.device("xla", device) if isinstance(device, int) else device)
    _bindings.set_rng_state(index, int(seed) & (1 << 64) - 1, 0)


def index_of(device: torch.device | str | None) -> int:
    """Index of an XLA device; that of the current one for None; RuntimeError where there is none."""
    if device is None:
        return _bindings.current_device()
    parsed = torch.device(device)
    if parsed.type != "xla":
        raise RuntimeError(message("device", f"Invalid device format: {device}", expected="xla or xla:<index>"))
    index = _bindings.current_device() if parsed.index is None else _bindings.known_index(parsed.index)
    if index >= _bindings.device_count():
        client.publish_count()
    if index >= client.device_count():
        raise RuntimeError(message("device", f"got {device}", expected=f"one of {list(map(str, devices()))}"))
    return index


def replaceable(name: str) -> Any:
    """A function of the package's top level, or what a program has put in its place: vendors replace `sync`."""
    return getattr(sys.modules["torch_xla"], name)
