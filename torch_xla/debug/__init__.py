"""Public path of the metrics."""

from torch_xla.debug import metrics as metrics
