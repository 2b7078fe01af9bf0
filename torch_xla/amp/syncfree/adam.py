"""Where torch_xla 2 has `Adam`."""

from torch_xla.amp.syncfree import Adam as Adam
