"""Public path of `deprecated`."""

from torch_xla._deprecation import deprecated as deprecated
