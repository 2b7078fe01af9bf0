"""Devices of other makers, by their PJRT libraries: what a package or a script says of one.

A package has an entry point ``torch_xla.plugins`` that names its `DevicePlugin`; a script calls `register_plugin`.
``PJRT_DEVICE=name`` chooses it; it is not imported before.
"""

from __future__ import annotations

from torch_xla._core.device import client, pjrt_plugins
from torch_xla._core.device.pjrt_plugins import DevicePlugin as DevicePlugin
from torch_xla._errors import message


def register_plugin(name: str, device_plugin: DevicePlugin) -> None:
    """Makes a plugin available as ``PJRT_DEVICE=name`` to this process, before one that is installed under that name.

    Processes that a launch starts import the script anew: call it where they do, at the top level of a module.

    Args:
        name: The name, in any case.
        device_plugin: The plugin.

    Raises:
        RuntimeError: Devices of that name are in use.
        TypeError: It is no `DevicePlugin`.
        ValueError: JAX has clients of that name itself: CPU, CUDA, ROCM and TPU.
    """
    if client.client_started() and client.device_type().lower() == name.lower():
        raise RuntimeError(
            message("device", f"got a plugin for {name!r}, whose devices are in use", do="register it before them")
        )
    pjrt_plugins.register(name, device_plugin)


def register_installed_plugins() -> None:
    """Does nothing: an installed plugin is found when ``PJRT_DEVICE`` names it."""


def use_dynamic_plugins() -> None:
    """Does nothing: there are no plugins of another kind to choose between."""


def using_dynamic_plugins() -> bool:
    """Whether the devices are those of a `DevicePlugin`, which `default` gives."""
    return pjrt_plugins.find(client.device_type()) is not None


def default() -> DevicePlugin:
    """The plugin of the devices in use or to be used.

    Raises:
        KeyError: They are JAX's own, or those of a plugin that only JAX knows.
    """
    plugin = pjrt_plugins.find(client.device_type())
    if plugin is None:
        raise KeyError(client.device_type())
    return plugin
