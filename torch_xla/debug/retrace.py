"""Why graphs were compiled again.

Each graph that is not known is compared with the graphs that ran from the same line of the program. If one of them is
similar, what differs is kept here, and told on stderr as far as ``XLA_NOTICES`` says.

Example::

    for found in torch_xla.debug.retrace.records():
        print(found.line, found.differences)
"""

from torch_xla._core.report.recompiles import Difference as Difference
from torch_xla._core.report.recompiles import Retrace as Retrace
from torch_xla._core.report.recompiles import clear as clear
from torch_xla._core.report.recompiles import records as records
from torch_xla.debug._guards import no_new_graphs as no_new_graphs

__all__ = ["Difference", "Retrace", "clear", "no_new_graphs", "records"]
