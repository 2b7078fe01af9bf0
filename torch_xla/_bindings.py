"""The one door to the native recorder, whose names these are: nothing else imports `torch_xla._C`."""

from torch_xla import _extension

_extension.load()  # which of several there may be

from torch_xla._C import *  # noqa: E402, F403
