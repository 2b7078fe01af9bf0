"""The PJRT client, through JAX: which devices there are, and copies between host and device.

Counting devices and naming their kind never starts the client; the first xla tensor does.
"""

from __future__ import annotations

import atexit
import functools
import importlib.metadata
import importlib.util
import itertools
import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from glob import glob
from typing import TYPE_CHECKING, Any

import torch

from torch_xla import _bindings, _config, _metrics, _timeline

if TYPE_CHECKING:
    import jax

_PLATFORMS = {"CPU": "cpu", "CUDA": "cuda", "GPU": "cuda", "ROCM": "rocm", "TPU": "tpu"}
_MOST_DIMENSIONS = 64

_wanted: Counter[tuple[Any, ...]] = Counter()  # how often what was packed and unpacked, by signature

_chosen: str | None = None
_started = False
_forked = False


def device_type() -> str:
    """Kind of the devices: ``"CPU"``, ``"CUDA"``, ``"TPU"`` or the name of a plugin.

    Taken from ``PJRT_DEVICE``, else from what the machine has.
    """
    name = _chosen or _config.PJRT_DEVICE.get()
    if name is not None:
        return name.upper() if name.upper() in _PLATFORMS else name
    if _tpu_chips() and importlib.util.find_spec("libtpu") is not None:
        return "TPU"
    if glob("/dev/nvidia[0-9]*") and any("cuda" in p for p in _plugins()):
        return "CUDA"
    return "CPU"


def set_device_type(name: str) -> None:
    """Chooses the kind of the devices.

    Raises:
        RuntimeError: The client runs already on another kind.
    """
    global _chosen
    if _started and name.upper() != device_type().upper():
        raise RuntimeError(
            f"[device] got device type {name}, but the process already uses {device_type()}; "
            "choose before the first xla tensor"
        )
    _chosen = name
    os.environ["PJRT_DEVICE"] = name
    publish_count()


def _platform() -> str:
    name = device_type()
    return _PLATFORMS.get(name.upper(), name.lower())


@functools.cache
def _plugins() -> tuple[str, ...]:
    """Names of the installed PJRT plugins, without loading them."""
    names = {point.name for point in importlib.metadata.entry_points(group="jax_plugins")}
    spec = importlib.util.find_spec("jax_plugins")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        names.update(os.path.basename(path) for path in glob(os.path.join(folder, "*")) if os.path.isdir(path))
    return tuple(sorted(n for n in names if not n.startswith("_")))


def _tpu_chips() -> int:
    return len(glob("/dev/accel*") or glob("/dev/vfio/[0-9]*"))


def _available() -> str:
    kinds = ["CPU", *("CUDA" if "cuda" in p else p for p in _plugins())]
    if _tpu_chips():
        kinds.append("TPU")
    return ", ".join(dict.fromkeys(kinds))


def device_count() -> int:
    """Number of devices of this process. Asks the client only for kinds that cannot be counted otherwise."""
    if _started:
        return len(_devices())
    platform = _platform()
    if platform == "cpu":
        return _config.CPU_NUM_DEVICES.get()
    if platform in ("cuda", "rocm"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return len([v for v in visible.split(",") if v]) if visible is not None else len(glob("/dev/nvidia[0-9]*"))
    if platform == "tpu":
        return _tpu_chips()
    return len(_devices())


def publish_count() -> None:
    """Tells the recorder how many devices there are, as PyTorch's autograd asks it without starting a client."""
    platform = _platform()
    if platform in ("cpu", "cuda", "rocm", "tpu"):
        _bindings.set_device_count(max(device_count(), 1))
    else:
        # A plugin counts its devices only once started; the count may be too high, but not too low.
        _bindings.set_device_count(8)


def client_started() -> bool:
    """Whether the PJRT client runs."""
    return _started


@functools.cache
def _devices() -> tuple[jax.Device, ...]:
    global _started
    import jax

    platform = _platform()
    if platform == "cpu" and _config.CPU_NUM_DEVICES.get() > 1:
        try:
            jax.config.update("jax_num_cpu_devices", _config.CPU_NUM_DEVICES.get())
        except RuntimeError:
            count = len(jax.local_devices(backend="cpu"))
            if count < _config.CPU_NUM_DEVICES.get():
                raise RuntimeError(
                    f"[device] got CPU_NUM_DEVICES={_config.CPU_NUM_DEVICES.get()}, but this process already runs JAX "
                    f"with {count} CPU device(s); create the first xla tensor before using JAX"
                ) from None
    try:
        devices = tuple(jax.local_devices(backend=platform))
    except RuntimeError as error:
        raise RuntimeError(
            f"[device] got PJRT_DEVICE={device_type()}, available here: {_available()}; set PJRT_DEVICE to one of them"
            f" ({error})"
        ) from error
    if platform == "cpu":
        devices = devices[: _config.CPU_NUM_DEVICES.get()]
        from torch_xla.ops import host_kernel

        host_kernel.register()  # a program from disk may call it
    _bindings.set_device_count(len(devices))
    _started = True
    os.register_at_fork(after_in_child=_note_fork)
    atexit.register(_finish_at_exit)  # after JAX has registered what takes its client down: the latest is called first
    # Workers of a DataLoader are forked beside the client and use no device; those that do get an error from us.
    warnings.filterwarnings("ignore", message="os.fork\\(\\) was called", category=RuntimeWarning)
    return devices


def _note_fork() -> None:
    global _forked
    _forked = True


def _finish_at_exit() -> None:
    """Waits for what was started: its threads must not meet a client and a process that are being taken down."""
    for index in range(0 if _forked else len(_devices())):
        for _ in range(_bindings.runs_in_flight(index)):  # not for more: a daemon thread may start ever new ones
            _bindings.wait_for_runs(index, max(_bindings.runs_in_flight(index) - 1, 0))


def _check_process() -> None:
    if _forked:
        raise RuntimeError(
            "[device] this process was forked after the xla client had started and cannot use it; start the child with "
            "the 'spawn' method, or create the first xla tensor after the fork"
        )


def jax_device(index: int) -> jax.Device:
    """The PJRT device behind ``xla:index``.

    Raises:
        RuntimeError: There is none, or the client cannot be started here.
    """
    _check_process()
    devices = _devices()
    if not 0 <= index < len(devices):
        raise RuntimeError(f"[device] got xla:{index}, available are xla:0 to xla:{len(devices) - 1}")
    return devices[index]


def hardware(index: int) -> str:
    """Name of a device's hardware, such as ``"CPU:0"``."""
    return f"{device_type()}:{index}"


def default_index() -> int:
    """Index of the current device."""
    return _bindings.current_device()


def memory_stats(index: int) -> dict[str, int] | None:
    """The client's memory statistics in bytes, or None where it keeps none (CPU)."""
    return jax_device(index).memory_stats()


def x64() -> AbstractContextManager[Any]:
    """A scope in which JAX keeps 64-bit types; outside it the user's own JAX code is not changed."""
    import jax

    return jax.enable_x64(True)


def upload(tensor: torch.Tensor, index: int) -> jax.Array:
    """Copies a CPU tensor to a device; the caller may change the tensor afterwards.

    Raises:
        TypeError: XLA has no such dtype.
        RuntimeError: The tensor has more dimensions than NumPy's arrays can have.
        torch.OutOfMemoryError: The host or the device has no room for it.
    """
    from torch_xla.ops.fallback import to_numpy

    if tensor.dim() > _MOST_DIMENSIONS:
        raise RuntimeError(
            f"[transfer] got a tensor of {tensor.dim()} dimensions, "
            f"only tensors with up to {_MOST_DIMENSIONS} dims are supported; reshape it"
        )
    with _metrics.timed("TensorToData"), _told(tensor.shape, tensor.dtype, index):
        # On CPU the client keeps aligned host memory instead of copying it, so it gets memory of its own.
        return put(to_numpy(tensor).copy(), index)


def put(array: Any, index: int) -> jax.Array:
    """Moves a NumPy array to a device; the array must not be changed afterwards."""
    import jax

    from torch_xla._core.device import jax_internals

    device = jax_device(index)
    _metrics.add_sample("OutboundData", array.nbytes, "bytes")
    with _metrics.timed("TransferToDeviceTime"):
        # What `jax.device_put` comes to, in an eighth of its time: a learning rate that changes is put at each step.
        aval = jax.core.ShapedArray(array.shape, array.dtype)
        return jax_internals.batched_device_put(aval, sharding(index), [array], [device], enable_x64=True)


@functools.cache
def sharding(index: int) -> jax.sharding.SingleDeviceSharding:
    """Where buffers of a device are, as JAX says it."""
    import jax

    return jax.sharding.SingleDeviceSharding(jax_device(index))


def fill(shape: tuple[int, ...], dtype: torch.dtype, number: Any, index: int, line: str | None = None) -> jax.Array:
    """A device buffer that holds one number everywhere.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        number: The number.
        index: Its device.
        line: The user's line that made it.

    Raises:
        torch.OutOfMemoryError: The host or the device has no room for it.
    """
    with _told(shape, dtype, index, line):
        return put(_host_fill(shape, dtype, number), index)


@contextmanager
def _told(shape: Sequence[int], dtype: torch.dtype, index: int, line: str | None = None) -> Iterator[None]:
    """A scope that moves values of a tensor to a device; what there is no room for is said as PyTorch says it."""
    try:
        yield
    except Exception as error:
        from torch_xla._core.device import memory

        if memory.ran_out(error):
            raise memory.explain_host(error, shape, dtype, index, line) from error
        raise


def _host_fill(shape: tuple[int, ...], dtype: torch.dtype, number: Any) -> Any:
    from torch_xla.ops.fallback import to_numpy

    return to_numpy(torch.full(shape, number, dtype=dtype))


def download(location: tuple[Any, int], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A new CPU tensor with values of the device; waits until they are computed.

    Args:
        location: The buffer and the index of the first element in it, -1 where it holds nothing else.
        shape: Sizes of the tensor.
        dtype: Its type.
    """
    import numpy as np

    from torch_xla.ops.fallback import from_numpy

    buffer, start = location
    asked = time.perf_counter()
    finish(buffer)
    _metrics.waited(asked)
    with _metrics.timed("TransferFromDeviceTime"):
        values = np.asarray(buffer)
        _metrics.add_sample("InboundData", values.nbytes, "bytes")
        if start >= 0:
            values = values[start : start + math.prod(shape)].reshape(shape)
        return from_numpy(values, dtype)


def finish(started: Any, index: int | None = None) -> None:
    """Waits for a buffer or a token.

    Args:
        started: What to wait for.
        index: Its device; a buffer knows it.

    Raises:
        ExecutionError: The program that makes it failed; a torch.OutOfMemoryError too where it did not fit.
    """
    try:
        started.block_until_ready()
    except Exception as error:
        from torch_xla._core.device import failures

        if index is None and started.is_deleted():
            raise  # no program failed: it was given to one
        raise failures.late(error, _index_of(started.device) if index is None else index) from error


def _index_of(device: Any) -> int:
    return next(index for index in range(_bindings.device_count()) if jax_device(index) == device)


def copy(location: tuple[Any, int], shape: Sequence[int]) -> jax.Array:
    """A new device buffer with the values at a location, as `download` reads them."""
    buffer, start = location
    if start < 0:
        return copies([buffer])[0]
    with x64():
        return buffer[start : start + math.prod(shape)].reshape(shape)


def copies(buffers: Sequence[Any]) -> list[Any]:
    """A copy of each device buffer, on its device; compiles nothing."""
    import jax

    with x64():
        return jax.device_put(list(buffers), may_alias=False)


def pack(buffers: Sequence[Any]) -> Any:
    """Several device buffers of one dtype end to end in one."""
    import jax
    import numpy as np

    # The first step's weights came from the host a moment ago, and a program for this would be one more to compile.
    if all(buffer.is_ready() for buffer in buffers):
        joined = np.concatenate([np.asarray(buffer).reshape(-1) for buffer in buffers])
        with x64():
            return jax.device_put(joined, buffers[0].device)
    earlier = _count_wanted("pack", tuple((buffer.shape, buffer.dtype) for buffer in buffers), buffers[0].device)
    with x64(), _compiling(earlier == 0):
        return _joined()(list(buffers))


def unpack(buffer: Any, shapes: tuple[tuple[int, ...], ...]) -> list[Any]:
    """The parts of a device buffer, each as one of its own."""
    import jax
    import numpy as np

    earlier = _count_wanted("unpack", (buffer.dtype, shapes), buffer.device)
    if earlier == 0:
        # Parts that are wanted once, for an evaluation say: a program would take XLA 10 ms for each of hundreds.
        finish(buffer)
        with x64():
            return jax.device_put(_parts(np.array(buffer), shapes), buffer.device)
    with x64(), _compiling(earlier == 1):
        return _split()(buffer, shapes)


def _parts(values: Any, shapes: tuple[tuple[int, ...], ...]) -> list[Any]:
    starts = itertools.accumulate((math.prod(shape) for shape in shapes), initial=0)
    return [values[i : i + math.prod(shape)].reshape(shape) for i, shape in zip(starts, shapes, strict=False)]


def _count_wanted(*signature: Any) -> int:
    """How often that was wanted before."""
    _wanted[signature] += 1
    return _wanted[signature] - 1


def _compiling(first: bool) -> AbstractContextManager[Any]:
    """Shows in profiles that JAX compiles something small of its own, as it does once per signature."""
    return _timeline.span("packing") if first else nullcontext()


@functools.cache
def _joined() -> Any:
    import jax
    import jax.numpy as jnp

    return jax.jit(lambda buffers: jnp.concatenate([buffer.reshape(-1) for buffer in buffers]))


@functools.cache
def _split() -> Any:
    import jax

    return jax.jit(_parts, static_argnums=1)
