"""Where a PJRT plugin is that knows nothing of this package: $PLUGIN_LIBRARY, or what extra `[plugin]` installs.

Run as a program it prints what `PJRT_NAMES_AND_LIBRARY_PATHS` is to be.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

NAME = "vendor"
MISSING = "no PJRT plugin: set PLUGIN_LIBRARY to one's path, or pip install fastatomstruct-xla-cpu"


def library() -> Path | None:
    """The plugin's library, or None where there is none."""
    given = os.environ.get("PLUGIN_LIBRARY")
    if given:
        return Path(given)
    result = importlib.util.find_spec("fastatomstruct_xla_cpu")
    path = Path(result.origin).with_name("libpjrt_cpu.so") if result is not None and result.origin else None
    return path if path is not None and path.is_file() else None


def environment(folder: Path, **options: int) -> dict[str, str]:
    """Variables for a process that has the plugin's devices.

    Args:
        folder: Where a file may be written.
        **options: What its client is created with, such as ``cpu_device_count``.
    """
    path = library()
    assert path is not None
    if options:
        library_path, path = str(path), folder / "plugin.json"
        path.write_text(json.dumps({"library_path": library_path, "create_options": options}))
    return {"PJRT_DEVICE": NAME, "PJRT_NAMES_AND_LIBRARY_PATHS": f"{NAME}:{path}"}


def package(folder: Path, name: str, points: dict[str, str], **modules: str) -> None:
    """Writes what pip leaves of a package: its modules, and metadata with entry points by group."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("".join(f"[{group}]\n{line}\n" for group, line in points.items()))
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)


if __name__ == "__main__":
    path = library()
    sys.exit(MISSING) if path is None else print(f"{NAME}:{path}")
