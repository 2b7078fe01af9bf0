"""Looking inside: metrics, why graphs are compiled again, profiles."""

from torch_xla.debug import memory as memory
from torch_xla.debug import metrics as metrics
from torch_xla.debug import retrace as retrace
from torch_xla.debug._guards import new_graphs_expected as new_graphs_expected
from torch_xla.debug._guards import no_new_graphs as no_new_graphs
from torch_xla.debug._profile.profile import profile as profile

__all__ = ["memory", "metrics", "new_graphs_expected", "no_new_graphs", "profile", "retrace"]
