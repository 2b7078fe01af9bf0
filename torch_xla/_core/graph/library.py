"""Has the library of operators in namespace ``xla``: this package's own, and those that callers define."""

from __future__ import annotations

from torch.library import Library

XLA_LIB = Library("xla", "FRAGMENT")
