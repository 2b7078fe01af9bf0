"""Has `Adam` under torch_xla 2's path."""

from torch_xla.amp.syncfree import Adam as Adam
