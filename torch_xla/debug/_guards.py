"""Blocks that say which new graphs are expected: all, which are not reported, or none, which is an error."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch_xla import _bindings, _config
from torch_xla._core.report import recompiles


class no_new_graphs:
    """A block in which every graph must be known already: for loops after their warm-up.

    Raises:
        GraphLimitError: (a `RuntimeError`) at the barrier or read that needs a new graph, before that is compiled. What
            was recorded stays pending, and runs at the next barrier outside the block.

    Example::

        for step, batch in enumerate(loader):
            with torch_xla.debug.no_new_graphs() if step > 2 else contextlib.nullcontext():
                train(batch)
                torch_xla.sync()
    """

    def __enter__(self) -> None:
        self._line = _bindings.user_frame() or "the start of the block"
        recompiles.forbid(self._line)

    def __exit__(self, *_: object) -> None:
        recompiles.allow(self._line)


def new_graphs_expected() -> AbstractContextManager[None]:
    """A block whose new graphs are meant: for a warm-up that compiles a graph for each of several shapes.

    What they differ in is kept in `torch_xla.debug.retrace.records`, and not told on stderr. It holds for the thread
    that runs the block.

    Example::

        with torch_xla.debug.new_graphs_expected():
            for length in (32, 64, 128):
                model(torch.zeros(1, length, dtype=torch.long, device="xla"))
                torch_xla.sync()
    """
    return _config.within(recompiles.expected, True)
