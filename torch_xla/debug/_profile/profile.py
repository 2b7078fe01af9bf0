"""The block that is profiled: it starts and stops what collects, and has the report."""

from __future__ import annotations

import html
import os
import sys
import threading
from typing import Any

from torch_xla import _bindings, _events
from torch_xla._errors import message
from torch_xla.debug._profile import account, page, table
from torch_xla.debug._profile.collect import Collector, Modules, Sampler
from torch_xla.debug._profile.report import Report

_SWITCH_SECONDS = 5e-4
_running: profile | None = None
_claim = threading.Lock()


class profile:
    """A block whose time is accounted for: what the host did, what the devices waited for, why graphs were compiled.

    Attributes:
        report: What was found, as data; there once the block is over, also when it raised.

    Raises:
        RuntimeError: A profile runs already. That one goes on.

    Example::

        with torch_xla.debug.profile() as profiled:
            for batch in loader:
                step(batch)
        print(profiled)
        profiled.save("report.html")
    """

    report: Report

    def __init__(self) -> None:
        self._line: str | None = None

    def __enter__(self) -> profile:
        global _running
        with _claim:
            if _running is not None:
                raise RuntimeError(
                    message(
                        "profile",
                        f"a profile runs already, since {_running._line or 'an unknown line'}",
                        expected="one at a time",
                        do="leave that block first; it goes on",
                    )
                )
            _running = self
        self._line = _bindings.user_frame()
        self._switch = sys.getswitchinterval()
        self._collector = Collector()
        try:
            self._collector.count_tensors()
        except BaseException:  # an interrupt, say: the next profile must not find this one
            _running = None
            raise
        sys.setswitchinterval(min(self._switch, _SWITCH_SECONDS))
        self._modules = Modules(self._collector)
        self._sampler = Sampler(self._collector)
        _events.listen(self._collector)
        return self

    def __exit__(self, *_: object) -> None:
        global _running
        _events.leave(self._collector)
        try:
            self._collector.finish()
        finally:
            self._sampler.stop()
            self._modules.stop()
            sys.setswitchinterval(self._switch)
            _running = None
        self.report = account.report(self._collector)
        del self._collector, self._modules, self._sampler

    def __getattr__(self, name: str) -> Any:
        if name == "report":
            raise RuntimeError(message("profile", "the block is not over", do="ask for the report after it"))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def table(self, width: int | None = None) -> str:
        """The report as text: stages by step, what the devices waited for, compiles, modules, lines, memory.

        Args:
            width: Columns; by default those of the terminal.

        Raises:
            ImportError: ``rich`` is not installed.
        """
        return table.text(self.report, width)

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        """The page, for a notebook's output."""
        source = html.escape(page.html(self.report, "report.json"))
        return f'<iframe srcdoc="{source}" style="width: 100%; height: 640px; border: 0"></iframe>'

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report as one page, and beside it the timeline for Perfetto or ``chrome://tracing``.

        Args:
            path: The page, such as ``report.html``; the timeline gets the same name with ``.json``.

        Raises:
            OSError: A file cannot be written. The report is kept and can be saved elsewhere.
        """
        page.save(self.report, path)
