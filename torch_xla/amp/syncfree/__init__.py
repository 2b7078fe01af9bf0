"""Optimizers that skip a step on the device when its gradients are not finite, without the host looking at them."""

from torch_xla.amp.syncfree.adam import Adam as Adam
from torch_xla.amp.syncfree.adamw import AdamW as AdamW
from torch_xla.amp.syncfree.sgd import SGD as SGD
