"""Has `AdamW` under torch_xla 2's path."""

from torch_xla.amp.syncfree import AdamW as AdamW
