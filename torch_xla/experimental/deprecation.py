"""Public path of what marks older names."""

from torch_xla._deprecation import deprecated as deprecated
from torch_xla._deprecation import mark_deprecated as mark_deprecated
