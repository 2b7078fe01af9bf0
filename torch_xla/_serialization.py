"""Registers ``xla`` with `torch.load`, `pickle`, `copy` and storages.

PyTorch saves an xla tensor as a CPU tensor and restores it from one. Here tensors that share a storage are saved as CPU
tensors that share one, and restored, or copied, as tensors that share one on the device.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from torch_xla import _bindings, _config
from torch_xla._errors import message
from torch_xla._torch_internals import python_state

_registered: list[torch.library.Library] = []
# Host copies of storages, by id, with the number of writes they show. A pickler keeps what it has saved alive.
_saved: weakref.WeakValueDictionary[tuple[int, int], torch.UntypedStorage] = weakref.WeakValueDictionary()
_sent: weakref.WeakValueDictionary[tuple[int, int], _Sent] = weakref.WeakValueDictionary()
# Of a file that has the values behind everything else: pairs of a tensor that they will be in, and one to copy them to.
_unread: ContextVar[list[tuple[torch.Tensor, torch.Tensor]] | None] = ContextVar("unread", default=None)
_MADE = "_xla_made"  # attribute of a host storage: the xla storages made from it, by device


class _Sent:
    """A host copy of a storage on its way to another process, by value: in shared memory it would have to live on."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage

    def __reduce__(self) -> tuple[Any, ...]:
        values = torch.empty(0, dtype=torch.uint8, device="cpu").set_(self.storage)
        return _received, (values.numpy().tobytes(),)


def _received(values: bytes) -> torch.UntypedStorage:
    memory = torch.empty(len(values), dtype=torch.uint8, device="cpu")
    memory.numpy()[:] = memoryview(values)
    return memory.untyped_storage()


class _Bytes(torch.UntypedStorage):
    """Host memory on its way to an XLA device; what its elements are is known once a tensor is made from it."""

    target: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device for the tensor that is made from it."""
        return self.target


def _restore(storage: Any, location: str) -> Any:
    if location.partition(":")[0] != "xla":
        return None
    device = torch.device(location)
    count = _bindings.device_count()
    if location == "xla":
        device = torch.device("xla", _bindings.current_device())
    elif (device := torch.device("xla", _bindings.known_index(device.index))).index >= count:
        expected = f"one of the {count} devices of this process"
        do = "give torch.load a map_location"
        raise RuntimeError(message("load", f"got a value for {location}", expected=expected, do=do))
    return _bound(storage, device)


def _bound(storage: Any, device: torch.device) -> Any:
    storage.target = device
    storage.__class__ = _Bytes
    return storage


def _on_device(tensor: torch.Tensor, device: torch.device) -> torch.UntypedStorage:
    """The xla storage that stands for a tensor's on a device: the same one for all tensors that share it."""
    storage = tensor.untyped_storage()
    if tensor.device == device:
        return storage
    storages: dict[torch.device, torch.UntypedStorage] = storage.__dict__.setdefault(_MADE, {})
    if device not in storages:
        source, waiting = _all_of(tensor, storage), _unread.get()
        made = source.to(device) if waiting is None else torch.empty_like(source, device=device)
        if waiting is not None:
            waiting.append((source, made))
        storages[device] = made.untyped_storage()
    return storages[device]


def _all_of(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """All memory of a tensor's storage."""
    size = tensor.element_size()
    if tensor.numel() * size == storage.nbytes() and _dense(tensor):
        return tensor
    dtype = torch.uint8 if storage.nbytes() % size else tensor.dtype
    whole = torch.empty(0, dtype=dtype, device=tensor.device)
    return whole.set_(storage, 0, (storage.nbytes() // whole.element_size(),), (1,))


def _dense(tensor: torch.Tensor) -> bool:
    return torch.ops.aten.is_non_overlapping_and_dense.default(tensor) and not tensor.is_conj() and not tensor.is_neg()


def _set_storage(
    self: torch.Tensor, source: torch.UntypedStorage, offset: int, size: Sequence[int], stride: Sequence[int] = ()
) -> torch.Tensor:
    if isinstance(source, _Bytes):
        host = torch.empty(0, dtype=self.dtype, device="cpu").set_(source, offset, size, stride)
        source = _on_device(host, self.device)
    _bindings.set_storage(self, source, offset, size, stride)
    return self


def _set_whole_storage(self: torch.Tensor, source: torch.UntypedStorage) -> torch.Tensor:
    return _set_storage(self, source, 0, (source.nbytes() // self.element_size(),))


def _tag(storage: Any) -> str | None:
    return str(storage.device) if storage.device.type == "xla" else None


def _host_alias(tensor: torch.Tensor) -> torch.Tensor | None:
    """A CPU tensor in a copy of the tensor's storage, which all that share the storage share."""
    base = _bindings.base_of(tensor)
    if base is None:
        return None
    key = (_bindings.tensor_id(tensor), _bindings.storage_generation(tensor))
    storage = _saved.get(key)
    if storage is None:
        storage = _saved[key] = base.cpu().untyped_storage()
    host = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return host.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _reducing(original: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    @functools.wraps(original)
    def reduce(self: torch.Tensor, proto: int) -> tuple[Any, ...]:
        if self.device.type != "xla" or torch.serialization._serialization_tls.skip_data:
            return original(self, proto)
        device, asks = str(self.device), self.requires_grad
        if type(self).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            if isinstance(self, torch._subclasses.FakeTensor) or self.data_ptr() != 0:
                return original(self, proto)
            # Its memory is that of its parts, which its state has.
            layout = (self.dtype, tuple(self.shape), self.stride(), self.storage_offset(), self.layout)
            return torch._utils._rebuild_wrapper_subclass, (type(self), *layout, device, asks)
        torch.utils.hooks.warn_if_has_hooks(self)
        host = _host_alias(self)
        if host is None:
            return original(self, proto)
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, (host, self.dtype, device, asks)

    return reduce


def _moved(data: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on the device, in the storage that all have which share its storage."""
    tensor = torch.empty(0, dtype=data.dtype, device=device)
    _bindings.set_storage(
        tensor, _on_device(data, tensor.device), int(data.storage_offset()), tuple(data.shape), data.stride()
    )
    return tensor


def _placed(data: torch.Tensor, function: Callable[[Any, str], Any], location: str) -> torch.Tensor:
    """A host tensor where a function given as map_location wants the storage of `location`."""
    if data.device.type != "cpu":
        return data  # it was shown the values as the host's, which they are in the file, and has put them there
    storage = function(data.untyped_storage(), location)
    if storage is None:
        return _moved(data, torch.device(location))
    if isinstance(storage, _Bytes):
        return _moved(data, storage.device)
    tensor = torch.empty(0, dtype=data.dtype, device=storage.device)
    tensor.set_(storage, data.storage_offset(), data.shape, data.stride())
    if (waiting := _unread.get()) is not None:
        waiting.append((_all_of(data, data.untyped_storage()), _all_of(tensor, storage)))
    return tensor


def _rebuilding(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    # Pickles name the function, so it keeps the name: they stay readable without this package.
    @functools.wraps(original)
    def rebuild(data: torch.Tensor, dtype: torch.dtype, device: str, requires_grad: bool) -> torch.Tensor:
        # A file of PyTorch's own holds the tensor with its gradient flag, and then the flag of its copy cannot be set.
        data = data.detach()
        if type(data).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # its memory is that of its parts
            if _unread.get() is not None:
                got = f"got a {type(data).__name__} in the format of PyTorch before 1.6"
                raise RuntimeError(
                    message("load", got, expected="a zip file", do="save it again by torch.save's default")
                )
            return original(data, dtype, device, requires_grad)
        function = torch.serialization._serialization_tls.map_location
        if callable(function) and torch.device(device).type == "xla":
            return _placed(data, function, device).requires_grad_(requires_grad)
        location = torch._utils._get_restore_location(device)
        if location.type != "xla":
            return original(data, dtype, device, requires_grad)
        return _moved(data, location).requires_grad_(requires_grad)

    return rebuild


def _with_bits(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def set_metadata(tensor: torch.Tensor, metadata: dict[str, bool]) -> None:
        if tensor.device.type != "xla":
            return original(tensor, metadata)
        view = tensor.detach()  # conjugates and negatives are views there, without bits
        view = view.conj() if metadata.get("conj") else view
        tensor.data = torch._neg_view(view) if metadata.get("neg") else view
        return None

    return set_metadata


def _reading_values_last(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(file: Any, map_location: Any, *args: Any, **options: Any) -> Any:
        state = torch.serialization._serialization_tls
        before, state.map_location = state.map_location, map_location  # PyTorch does so for zip files only
        waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            result = _config.within(_unread, waiting)(original)(file, map_location, *args, **options)
        finally:
            state.map_location = before
        for source, made in waiting:
            made.copy_(source)
        return result

    return load


def _with_index(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def location(device: Any) -> Any:
        place = torch.device(original(device))
        return torch.device("xla", _bindings.current_device()) if place == torch.device("xla") else place

    return location


def _reduce_for_process(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The pickled form of a tensor for another process: its storage's values, and its device."""
    if tensor.device.type != "xla" or (tensor.requires_grad and not tensor.is_leaf):
        return reductions.reduce_tensor(tensor)
    torch.utils.hooks.warn_if_has_hooks(tensor)
    host = _host_alias(tensor.detach())
    if host is None:
        host = tensor.detach().cpu()
        sent = _Sent(host.untyped_storage())
    else:
        key = (_bindings.tensor_id(tensor), _bindings.storage_generation(tensor))
        sent = _sent.setdefault(
            key, _Sent(host.untyped_storage())
        )  # once for all that share it: picklers know it again
    layout = (host.dtype, int(host.storage_offset()), tuple(host.shape), host.stride())
    return _rebuild_in_process, (type(tensor), sent, layout, str(tensor.device), tensor.requires_grad)


def _rebuild_in_process(
    kind: type[torch.Tensor],
    storage: torch.UntypedStorage,
    layout: tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]],
    device: str,
    grad: bool,
) -> torch.Tensor:
    dtype, *place = layout
    host = torch.empty(0, dtype=dtype, device="cpu").set_(storage, *place)
    tensor = torch._utils._rebuild_device_tensor_from_cpu_tensor(host, host.dtype, device, False)
    return torch.nn.Parameter(tensor, grad) if kind is torch.nn.Parameter else tensor.requires_grad_(grad)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "xla" or python_state(tensor):
        return copy._reconstruct(tensor, None, *tensor.__reduce_ex__(4))  # type: ignore[attr-defined]
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _deepcopy(tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    is_memoized = id(tensor) in memo
    copied = torch.Tensor.__deepcopy__(tensor, memo)
    if is_memoized or tensor.device.type != "xla" or (base := _bindings.base_of(tensor)) is None:
        return copied
    # A clone has the value of its source until one of the two is written, so neither of the two here costs anything.
    storages = memo.setdefault("torch", {})  # where PyTorch notes storages that were copied by themselves
    key = tensor.untyped_storage()._cdata
    if key not in storages:
        storages[key] = base.clone().untyped_storage()
    _bindings.set_storage(copied, storages[key], int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
    return copied


def _resizing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != "xla":
            return original(self, size)
        _bindings.resize_storage(self, size)
        return self

    return resize_


def _making(original: Callable[..., torch.UntypedStorage]) -> Callable[..., torch.UntypedStorage]:
    @functools.wraps(original)
    def new(kind: Any, *args: Any, **options: Any) -> torch.UntypedStorage:
        device = options.get("device")
        if device is None or torch.device(device).type != "xla":
            return original(kind, *args, **options)
        if args and isinstance(args[0], int):
            return torch.empty(args[0], dtype=torch.uint8, device=device).untyped_storage()
        host = original(kind, *args, **{**options, "device": "cpu"})
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(host).to(device).untyped_storage()

    return new


def _slicing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get(self: torch.UntypedStorage, index: Any) -> Any:
        if isinstance(self, _Bytes) and isinstance(index, slice):
            return _bound(original(self, index), self.target)
        if self.device.type != "xla" or not isinstance(index, slice):
            return original(self, index)
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)[index].clone().untyped_storage()

    return get


def install() -> None:
    """Registers ``xla`` as a place to load to, and how its tensors are pickled and copied; called once, at import."""
    # A priority of its own: PyTorch sorts the entries, and two functions cannot be compared.
    torch.serialization.register_package(49, _tag, _restore)
    library = torch.library.Library("aten", "IMPL")
    library.impl("set_.source_Storage_storage_offset", _set_storage, "XLA")
    library.impl("set_.source_Storage", _set_whole_storage, "XLA")
    _registered.append(library)
    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, _reduce_for_process)
    copy._copy_dispatch[torch.Tensor] = _copy  # type: ignore[attr-defined]
    copy._deepcopy_dispatch[torch.Tensor] = _deepcopy  # type: ignore[attr-defined]
    # There is no registration for these: how a tensor is pickled, how a file of the format before PyTorch 1.6 is read,
    # what makes a tensor of a file, and where, and how a storage is made, sliced (to a copy) and resized.
    torch.Tensor._reduce_ex_internal = _reducing(torch.Tensor._reduce_ex_internal)  # type: ignore[method-assign]
    torch.serialization._legacy_load = _reading_values_last(torch.serialization._legacy_load)
    torch._utils.set_tensor_metadata = _with_bits(torch._utils.set_tensor_metadata)
    torch._utils._get_restore_location = _with_index(torch._utils._get_restore_location)
    torch._utils._rebuild_device_tensor_from_cpu_tensor = _rebuilding(
        torch._utils._rebuild_device_tensor_from_cpu_tensor
    )
    torch.UntypedStorage.__new__ = _making(torch.UntypedStorage.__new__)  # type: ignore[assignment, method-assign]
    torch.UntypedStorage.__getitem__ = _slicing(torch.UntypedStorage.__getitem__)  # type: ignore[method-assign]
    torch.UntypedStorage.resize_ = _resizing(torch.UntypedStorage.resize_)  # type: ignore[method-assign]
