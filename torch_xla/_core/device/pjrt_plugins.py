"""Lists PJRT plugins without importing any, and gives the chosen one to JAX, which starts clients.

A plugin is named by a package with an entry point `torch_xla.plugins` (a `DevicePlugin`, imported once it is chosen) or
`jax_plugins` (JAX imports all of them when it starts), by a call of `register`, or by the environment
(`PJRT_NAMES_AND_LIBRARY_PATHS`, which JAX reads itself, and `PJRT_LIBRARY_PATH`).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import importlib.util
import os
from collections.abc import Collection
from glob import glob
from importlib.metadata import EntryPoint, entry_points, version
from typing import Any

import torch

from torch_xla import _bindings, _config
from torch_xla._core.device import environment
from torch_xla._errors import message, one_line

OWN = {"CPU": "cpu", "CUDA": "cuda", "GPU": "cuda", "ROCM": "rocm", "TPU": "tpu"}  # kinds that JAX has clients of
NAMED = "PJRT_NAMES_AND_LIBRARY_PATHS"
_GROUPS = ("torch_xla.plugins", "jax_plugins")
_OPTION = "text, numbers, booleans or lists of whole numbers by name"


class DevicePlugin:
    """A kind of device that a PJRT library has; a subclass says at least where the library is.

    An entry point of group ``torch_xla.plugins`` names the subclass, or `register_plugin` gets an instance. Its methods
    are called by the process that uses the device, before the client starts; the number of chips by one that launches.
    """

    def library_path(self) -> str:
        """Path of the shared library with ``GetPjrtApi``, or a name that the dynamic linker finds."""
        raise NotImplementedError

    def client_create_options(self) -> dict[str, Any]:
        """Options for the library's client: values are text, numbers, booleans or lists of whole numbers."""
        return {}

    def requires_xla_coordinator(self) -> bool:
        """Whether the client needs JAX's coordinator in a process alone too; in a job of several it always has it."""
        return False

    def configure_single_process(self) -> None:
        """Called where a launch is asked for one process, before the client starts."""

    def configure_multiprocess(self, local_rank: int, local_world_size: int) -> None:
        """Called in each process of a job that has several on this host, before the client starts.

        Args:
            local_rank: Number of this process on its host; it should use the device of that number.
            local_world_size: How many processes the host has.
        """

    def unsupported_dtypes(self) -> Collection[torch.dtype]:
        """Types that the device has not.

        For ``torch.float64`` or ``torch.int64`` numbers that are inputs of programs travel in types of 32 bits.
        """
        return ()

    def physical_chip_count(self) -> int:
        """Number of devices of this host, each of which a launched job has a process for."""
        return 1

    def host_index(self) -> int:
        """Number of this host; by default what the job's launcher says."""
        return environment.rank_info().host


class _FromEnvironment(DevicePlugin):
    def library_path(self) -> str:
        return _config.PJRT_LIBRARY_PATH.get() or ""


_registered: dict[str, DevicePlugin] = {}


def register(name: str, plugin: DevicePlugin) -> None:
    """Makes a plugin available as ``PJRT_DEVICE=name``, before one that is installed under that name.

    Raises TypeError where it is none, ValueError where JAX has clients of that name.
    """
    if not isinstance(plugin, DevicePlugin):
        raise TypeError(_unfit(name, f"is {plugin!r}"))
    if name.upper() in OWN:
        raise ValueError(
            message("device", f"got a plugin named {name!r}, which is JAX's own", do="register it under another name")
        )
    _registered[name.lower()] = plugin


def find(name: str) -> DevicePlugin | None:
    """The `DevicePlugin` of a name, which is imported now if it is installed; None where there is none.

    Raises RuntimeError where it cannot be imported or made, or two have that name.
    """
    key = name.lower()
    if key not in _registered and name.upper() not in OWN:
        point = _only(name, [point for point in _points()[0] if point.name.lower() == key])
        if point is not None:
            _registered[key] = _load(point)
        elif key == "library" and _config.PJRT_LIBRARY_PATH.is_set():
            _registered[key] = _FromEnvironment()
    return _registered.get(key)


def choose(name: str) -> DevicePlugin | None:
    """As `find`, of the devices in use: what it says decides which numbers are inputs of programs, and how."""
    plugin = find(name)
    missing = () if plugin is None else plugin.unsupported_dtypes()
    _bindings.set_wide_numbers(torch.float64 not in missing, torch.int64 not in missing)
    return plugin


def _load(point: EntryPoint) -> DevicePlugin:
    named = f"entry point {point.value} of {_package(point)}"
    try:
        plugin = point.load()()
    except Exception as error:  # what a package of somebody else's raises
        raise RuntimeError(
            message(
                "device",
                f"got {type(error).__name__} ({one_line(error)}) from plugin {point.name!r}, {named}",
                expected="a DevicePlugin",
                do="fix or uninstall it",
            )
        ) from error
    if not isinstance(plugin, DevicePlugin):
        raise RuntimeError(_unfit(point.name, f"({named}) is {plugin!r}"))
    return plugin


def _unfit(name: str, got: str) -> str:
    return message(
        "device",
        f"plugin {name!r} {got}",
        expected="a torch_xla.experimental.plugins.DevicePlugin",
        do="derive its class from that one",
    )


def _only(name: str, points: list[EntryPoint]) -> EntryPoint | None:
    if len({point.value for point in points}) > 1:
        both = " and ".join(f"{point.value} of {_package(point)}" for point in points)
        raise RuntimeError(message("device", f"got several plugins named {name!r}: {both}", do="uninstall all but one"))
    return points[0] if points else None


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown package"


@functools.cache
def _points() -> tuple[tuple[EntryPoint, ...], tuple[EntryPoint, ...]]:
    """The entry points of both groups, which a reading of packages' metadata finds."""
    uses_installed = _config.XLA_REGISTER_INSTALLED_PLUGINS.get()
    own_group, jax_group = ((*entry_points(group=group),) for group in _GROUPS)
    return own_group if uses_installed else (), jax_group


@functools.cache
def _of_jax() -> dict[str, str]:
    """Modules of JAX's plugins by name."""
    modules = {point.name: point.value for point in _points()[1]}
    spec = importlib.util.find_spec("jax_plugins")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        names = (os.path.basename(path) for path in glob(os.path.join(folder, "*")) if os.path.isdir(path))
        modules |= {name: f"jax_plugins.{name}" for name in names if not name.startswith("_")}
    return modules


def libraries() -> dict[str, str]:
    """Plugins that the environment names, with their libraries, as JAX reads them."""
    pairs = (pair.partition(":") for pair in os.environ.get(NAMED, "").split(",") if pair)
    return {name: path for name, _, path in pairs}


def has_cuda() -> bool:
    """Whether a plugin for NVIDIA's GPUs is installed."""
    return any("cuda" in name for name in _of_jax())


@functools.cache
def platform_of(name: str) -> str:
    """JAX's name of a kind of device."""
    if name.upper() in OWN:
        return OWN[name.upper()]
    return next((platform for platform in (*libraries(), *_of_jax()) if platform.lower() == name.lower()), name.lower())


def tpu_chips() -> int:
    """Number of TPU chips of this host."""
    return len(glob("/dev/accel*") or glob("/dev/vfio/[0-9]*"))


def available() -> list[str]:
    """The kinds of devices that may be chosen."""
    kinds = ["CPU", *("CUDA" if "cuda" in name else name for name in sorted(_of_jax()))]
    kinds += [name for name, path in libraries().items() if os.path.isfile(path)]
    kinds += [*(point.name for point in _points()[0]), *(name for name in _registered if name != "library")]
    if tpu_chips():
        kinds.append("TPU")
    return list({name.lower(): name for name in reversed(kinds)}.values())[::-1]


def give_to_jax(name: str) -> None:
    """Makes JAX find its plugins, and registers the chosen one with it; RuntimeError if it does not fit."""
    from torch_xla import _jax_internals

    is_builtin, platform = name.upper() in OWN, platform_of(name)
    library, module = (None, None) if is_builtin else (libraries().get(platform), _of_jax().get(platform))
    if library is not None and not os.path.isfile(library):
        raise RuntimeError(
            message(
                "device",
                f"got {NAMED}={platform}:{library}",
                expected="the path of a file that is there",
                do=f"correct it, or set PJRT_DEVICE to what is available here: {', '.join(available())}",
            )
        )
    if module is not None:
        _check_module(platform, module)
    plugin = choose(name)
    started = os.environ.get("JAX_PLATFORMS", "").lower().split(",")
    if not is_builtin and started != [""] and platform.lower() not in started:
        raise RuntimeError(
            message(
                "device",
                f"got JAX_PLATFORMS={os.environ['JAX_PLATFORMS']} and PJRT_DEVICE={name}",
                expected=f"{platform} among the former",
                do="unset it, or name both cpu and this one",
            )
        )
    where = library or module or "one that JAX found"
    try:
        raised = _jax_internals.find_plugins(module)
    except Exception as error:  # a library that cannot be loaded, or what a package of somebody else's raises
        raised = error
    if raised is not None:
        raise RuntimeError(_unusable(name, where, one_line(raised))) from raised
    if plugin is not None:
        where = _register_with_jax(platform, plugin)
    for kind, address in _jax_internals.plugin_apis().items():  # JAX starts the clients of all
        problem = _problem(_Api.from_address(address))
        if problem is not None:
            refusal = RuntimeError(_unusable(kind, where if kind == platform else "one that JAX found", problem))
            _jax_internals.refuse_plugin(kind, refusal)
            if kind == platform:
                raise refusal


def _check_module(name: str, module: str) -> None:
    _only(name, [point for point in _points()[1] if point.name == name])
    try:
        plugin_module = importlib.import_module(module)  # JAX would log what this raises, and go on
    except Exception as error:
        raise RuntimeError(_unusable(name, module, f"{type(error).__name__}: {one_line(error)}")) from error
    if not callable(getattr(plugin_module, "initialize", None)):
        raise RuntimeError(_unusable(name, module, "it has no function initialize(), by which JAX registers it"))


def _register_with_jax(platform: str, plugin: DevicePlugin) -> str:
    from torch_xla import _jax_internals

    rank = environment.rank_info()
    if rank.local_world > 1:
        plugin.configure_multiprocess(rank.local_rank, rank.local_world)
    name = type(plugin).__qualname__
    try:
        path = os.fspath(plugin.library_path())
        options = plugin.client_create_options()
    except Exception as error:
        reason = "it does not override library_path()" if isinstance(error, NotImplementedError) else one_line(error)
        raise RuntimeError(_unusable(platform, name, f"{type(error).__name__}: {reason}")) from error
    if not isinstance(options, dict) or not all(isinstance(key, str) and _is_option(options[key]) for key in options):
        raise RuntimeError(
            message(
                "device",
                f"got client_create_options()={options!r} of plugin {platform!r}",
                expected=_OPTION,
                do=f"correct {name}",
            )
        )
    if _jax_internals.clients_run():
        raise RuntimeError(
            message(
                "device",
                f"got PJRT_DEVICE={platform}, but this process already uses JAX, which takes no further plugins",
                do="create the first xla tensor before using JAX",
            )
        )
    try:
        _jax_internals.register_plugin(platform, path, options)
    except Exception as error:
        raise RuntimeError(_unusable(platform, path, one_line(error))) from error
    return path


def _is_option(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, int) for item in value)
    return isinstance(value, (str, int, float))


class _Api(ctypes.Structure):
    """The beginning of `PJRT_Api`: as much as the oldest version has that XLA accepts."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("version_size", ctypes.c_size_t),
        ("version_extensions", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        ("functions", ctypes.c_void_p * 92),  # to PJRT_Executable_OutputDimensions, of version 0.29
    )


_TO_CLIENT_CREATE = 11  # functions that every client is made with


@functools.cache
def identity(name: str) -> str:
    """The identity of a plugin that its programs depend on; libraries often say nothing of their version."""
    platform = platform_of(name)
    if name.upper() in OWN:
        return ""  # their versions are jaxlib's, or in what the client says
    from torch_xla import _jax_internals

    path = _library_at(_jax_internals.plugin_apis().get(platform, 0))
    if path is None:
        return f"unknown {os.getpid()}"  # no other process takes what this one compiled
    with open(path, "rb") as library:
        content = hashlib.file_digest(library, "sha256").hexdigest()
    return f"{content} {sorted(_jax_internals.client_options(platform).items())}"


def _library_at(address: int) -> str | None:
    class Found(ctypes.Structure):
        _fields_ = (("file", ctypes.c_char_p), *((n, ctypes.c_void_p) for n in ("base", "symbol", "at")))

    symbol_info = Found()
    if not ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(symbol_info)) or not symbol_info.file:
        return None
    path = os.fsdecode(symbol_info.file)
    return path if os.path.isfile(path) else None


def _problem(api: Any) -> str | None:
    """Why XLA cannot use a library, whose size and functions it does not check itself; None if it can."""
    api_version = f"version {api.major}.{api.minor} of PJRT's interface"
    if api.major != 0:
        return f"it has {api_version}"
    if api.size < ctypes.sizeof(_Api):
        return f"it has {api_version} in {api.size} bytes, where version 0.29 had {ctypes.sizeof(_Api)}"
    if not all(api.functions[:_TO_CLIENT_CREATE]):
        return f"it has {api_version} without functions up to PJRT_Client_Create"
    return None


def _unusable(name: str, where: str, why: str) -> str:
    return message(
        "device",
        f"got plugin {name!r} ({where}), which JAX cannot use: {why}",
        expected=f"one made for jaxlib {version('jaxlib')}",
        do="install one that fits, or set PJRT_DEVICE to another",
    )
