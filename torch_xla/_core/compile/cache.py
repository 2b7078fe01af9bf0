"""Finds the executable of a graph by its structural key, in memory and, if that is set, on disk."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import re
import stat
import tempfile
from collections.abc import Hashable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from torch_xla import _bindings, _config, _events, _extension, _files, _metrics, _notices
from torch_xla._core.compile import compiler, settings
from torch_xla._core.compile.compiler import Executable
from torch_xla._core.device import buffers, client, placement, shardings
from torch_xla._core.graph import sequence
from torch_xla._core.graph.graph import describe
from torch_xla._core.job import session
from torch_xla._errors import message, one_line

_CAPACITY = 1024
# XLA:CPU maps some 60 regions of memory per executable. At the kernel's limit, 65530 by default, LLVM does not get one
# and the process dies.
_MAPS_USED = 0.8  # part of the limit above which executables are dropped
_MAPS_PER_EXECUTABLE = 400  # more than any has
_ADDRESS = re.compile(" at 0x[0-9a-f]+")  # of an object that a process has
# What a file ends with, behind a checksum. It begins with the executable, which a plugin's own tools read.
_MAGIC = b"torch_xla executable 2\n"
_TAIL = hashlib.sha256().digest_size + len(_MAGIC)

_executables = _bindings.ExecutableCache()
_metrics.provide("CachedCompile", lambda: _executables.hits)
_folder: Path | None = None
_readonly = False
_count = itertools.count()
_latest: tuple[Hashable, int] = (), next(_count)  # settings, and their number
_stores_to_come = 0  # before mappings must be counted again


def initialize(path: str, readonly: bool = False) -> None:
    """Keeps compiled graphs in a folder, so that a later process neither lowers nor compiles them.

    A program is code: whoever writes into the folder decides what this process runs. It is made if missing, for this
    user alone; files that were used longest ago go where there are more bytes than ``XLA_PERSISTENT_CACHE_MAX_BYTES``.
    Raises RuntimeError where it cannot be made or written, or others may write into it and
    ``XLA_PERSISTENT_CACHE_TRUSTED`` is not set.
    """
    global _folder, _readonly
    folder = Path(path).expanduser()
    if not readonly:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise RuntimeError(
                f"[cache] got {path}, expected a folder that can be written ({error}); choose another, or readonly=True"
            ) from error
    _refuse_strangers(folder)
    _folder, _readonly = folder, readonly


def _refuse_strangers(folder: Path) -> None:
    """Raises where somebody else but the superuser may write programs into the folder."""
    if _config.XLA_PERSISTENT_CACHE_TRUSTED.get() or not folder.exists():
        return
    folder_status = folder.stat()
    if folder_status.st_uid not in (os.geteuid(), 0):
        why = f"which belongs to user {folder_status.st_uid}"
    elif folder_status.st_mode & stat.S_IWOTH:
        why = "into which everybody can write"
    else:
        return
    raise RuntimeError(
        message(
            "cache",
            f"got {folder}, {why}",
            expected=f"a folder of user {os.geteuid()}: this process runs what it finds there",
            do="choose another, or set XLA_PERSISTENT_CACHE_TRUSTED=1",
        )
    )


@functools.cache
def _initialize_from_environment() -> None:
    path = _config.XLA_PERSISTENT_CACHE_PATH.get()
    if path is not None and _folder is None:
        initialize(path, _config.XLA_PERSISTENT_CACHE_READ_ONLY.get())


def is_kept() -> bool:
    """Whether compiled graphs are kept in a folder."""
    _initialize_from_environment()
    return _folder is not None


def num_graphs() -> int:
    """Number of executables in memory."""
    return len(_executables)


def clear() -> None:
    """Forgets the executables in memory."""
    _executables.clear()


def run(graph: _bindings.Graph) -> bool:
    """Runs a graph whose executable is in memory, as `find` and `executor.run` do; False if it is not."""
    return _executables.run(graph, settings_number())


def find(graph: _bindings.Graph) -> Executable | None:
    """The executable of a graph that is in memory, or None.

    The graph's numbers travel as the executable takes them from now on; where it takes two as one that differ here,
    that is none for this graph.
    """
    cached_program: Executable | None = _executables.find(graph, settings_number())
    return cached_program


def knows(graph: _bindings.Graph) -> bool:
    """Whether a graph's executable is in memory."""
    is_cached: bool = _executables.knows(graph, settings_number())
    return is_cached


def load(graph: _bindings.Graph) -> Executable | None:
    """The executable of a graph from the disk, or None; counts what it found."""
    _initialize_from_environment()
    executable = _load(graph)
    if _folder is not None:
        _events.mark("persistent cache", executable is not None)
    if executable is not None:
        _metrics.count("PersistentCacheHit")
        _store(graph, executable)
    elif _folder is not None:
        _metrics.count("PersistentCacheMiss")
    return executable


def add(graph: _bindings.Graph, executable: Executable) -> None:
    """Remembers a program that was compiled, here or by another process of the job."""
    _metrics.count("SharedCompile" if executable.shared else "UncachedCompile")
    _store(graph, executable)
    # A program that calls back into this process cannot run in another.
    if _folder is not None and not _readonly and not executable.program.waits and not executable.shared:
        _save(graph, executable)


def _store(graph: _bindings.Graph, executable: Executable) -> None:
    _executables.add(graph, settings_number(), executable, executable.program)
    _executables.drop(max(0, len(_executables) - _CAPACITY))
    _keep_below_map_limit()


def _keep_below_map_limit() -> None:
    """Drops the executables used longest ago while the process has too many memory mappings."""
    global _stores_to_come
    _stores_to_come -= 1
    if _stores_to_come > 0:
        return
    limit, used = _maps()
    while used > limit and len(_executables) > 1:
        count = max(1, len(_executables) // 4)
        _executables.drop(count)
        _metrics.count("ExecutablesDropped", count)
        limit, used = _maps()
    _stores_to_come = max(1, (limit - used) // _MAPS_PER_EXECUTABLE)


def _maps() -> tuple[int, int]:
    """The limit of memory mappings at which executables are dropped, and how many the process has."""
    try:
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        with open("/proc/self/maps", "rb") as file:
            return int(limit * _MAPS_USED), sum(1 for _ in file)
    except OSError:  # not Linux
        return 1 << 62, 0


def settings_number() -> int:
    """A number for the settings, beside the graph, that a program depends on in this process."""
    global _latest
    now = settings.program_settings()
    if now != _latest[0]:  # a comparison takes a tenth of the time of a look-up: most of them are the same objects
        _latest = now, _number(now)
    return _latest[1]


@functools.lru_cache(maxsize=4096)
def _number(of: Hashable) -> int:
    return next(_count)


@functools.cache
def _identity() -> bytes:
    """What an executable depends on beside the graph: versions, this package's rules, the machine."""
    digest = hashlib.sha256()
    for name in ("jax", "jaxlib", "torch"):
        digest.update(f"{name} {version(name)}\n".encode())
    package = Path(_config.__file__).parent
    # The recorder makes the key and decides which buffers travel together.
    sources = [*package.glob("ops/**/*.py"), *package.glob("_core/**/*.py"), _extension.find()]
    for source in sorted(sources):
        digest.update(source.read_bytes())
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        digest.update(f"{name} {sorted(os.environ.get(name, '').split())}\n".encode())
    return digest.digest()


def _file(graph: _bindings.Graph) -> Path:
    assert _folder is not None
    target = placement.of(graph.device)
    digest = hashlib.sha256(_identity())
    decides = _ADDRESS.sub("", str(settings.program_settings())) + (shardings.noted() if client.spmd() else "")
    digest.update(f"{graph.key} {graph.number_indices} {graph.stacks} {decides} {target.target}".encode())
    if session.connected() is not None:
        digest.update(sequence.part_of(describe(graph), session.rank_info().rank).encode())
    return _folder / f"{digest.hexdigest()}.xla"


def _save(graph: _bindings.Graph, executable: Executable) -> None:
    """Writes to a file of another name first: a process killed here leaves nothing under the real one."""
    path = _file(graph)
    try:
        payload = executable.loaded.serialize()
        with _files.replacing(path) as draft:
            Path(draft).write_bytes(payload + hashlib.sha256(payload).digest() + _MAGIC)
        _events.mark("kept", path)
        _keep_below_size_limit(path.parent)
    except Exception as error:  # a full disk, or a plugin that cannot serialize: the program runs all the same
        text = f"a compiled graph could not be kept in {path.parent}: {one_line(error)}"
        _notices.notify("cache", path.parent, text)
        _metrics.count("PersistentCacheWriteFailed")


def _keep_below_size_limit(folder: Path) -> None:
    """Removes the files used longest ago while there are too many bytes; other processes may do so at the same time."""
    files = []
    for entry in os.scandir(folder):
        if entry.name.endswith((".xla", ".part")):
            with suppress(FileNotFoundError):
                files.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
    excess = sum(size for _, size, _ in files) - _config.XLA_PERSISTENT_CACHE_MAX_BYTES.get()
    for _, size, path in sorted(files):
        if excess <= 0:
            break
        Path(path).unlink(missing_ok=True)
        _metrics.count("PersistentCacheRemoved")
        excess -= size


def _load(graph: _bindings.Graph) -> Executable | None:
    if _folder is None or not buffers.kind().CAN_LOAD:
        return None
    path = _file(graph)
    try:
        content = path.read_bytes()
        if not _readonly:
            os.utime(path)  # it is in use
    except OSError:
        return None
    payload, tail = content[:-_TAIL], content[-_TAIL:]
    if tail != hashlib.sha256(payload).digest() + _MAGIC:
        _metrics.count("PersistentCacheDamaged")
        return None
    try:
        loaded = compiler.deserialize(payload, graph.device)
    except Exception:  # whatever XLA objects to: it compiles anew
        _metrics.count("PersistentCacheDamaged")
        return None
    return compiler.executable(loaded, graph)
