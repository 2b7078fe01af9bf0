"""Where torch_xla 2 has `SGD`."""

from torch_xla.amp.syncfree import SGD as SGD
