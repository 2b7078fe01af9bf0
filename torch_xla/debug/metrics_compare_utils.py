"""Comparing metrics reports: `torch_xla._legacy.metrics_compare` under its path."""

from torch_xla._legacy.metrics_compare import *  # noqa: F403
