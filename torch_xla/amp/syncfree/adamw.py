"""Where torch_xla 2 has `AdamW`."""

from torch_xla.amp.syncfree import AdamW as AdamW
