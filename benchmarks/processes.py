"""Measurements in a process of their own, which keeps one's caches, threads and memory out of the next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def measured(module: str, *arguments: str, settings: Mapping[str, str] | None = None) -> Any:
    """What a module of `benchmarks` prints as its last line, a JSON value, in a fresh process.

    Args:
        module: Its name, run with `arguments`.
        settings: Environment variables beside those of this process.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    environment = os.environ | (settings or {})
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have their bytecode too
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])
