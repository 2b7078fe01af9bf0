"""`torch.nn.GRU` by the name it has in torch_xla 2, whose own GRU replaced PyTorch's.

Here PyTorch's class runs as one scan per layer and direction by itself. Scripts that reached for the class that was
replaced find it in the attribute they expect.
"""

import torch

GRU = torch.nn.GRU
GRU._orig = GRU  # type: ignore[attr-defined]
