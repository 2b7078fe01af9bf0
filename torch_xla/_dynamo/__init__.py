"""Has torch_xla 2's module of what `torch.compile` calls."""

from torch_xla._dynamo import config as config
