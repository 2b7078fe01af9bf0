"""Where torch_xla 2 has what `torch.compile` calls."""

from torch_xla._dynamo import config as config
