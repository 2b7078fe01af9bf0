"""Runs a script as a TPU slice would have it, on a machine without one: ``python -m torch_xla.ahead --help``.

``XLA_AHEAD=v5e:8x8`` in front of any command does the same.
"""

import sys

from torch_xla.debug._ahead.command import main as main
from torch_xla.debug._ahead.command import report as report
from torch_xla.debug._ahead.report import Collective as Collective
from torch_xla.debug._ahead.report import Held as Held
from torch_xla.debug._ahead.report import Memory as Memory
from torch_xla.debug._ahead.report import Program as Program
from torch_xla.debug._ahead.report import Report as Report

__all__ = ["Collective", "Held", "Memory", "Program", "Report", "main", "report"]

if __name__ == "__main__":
    sys.exit(main())
