"""Mixed precision: PyTorch's own autocast and gradient scaler, set up for ``xla``."""

from torch_xla.amp import syncfree as syncfree
from torch_xla.amp.autocast_mode import autocast as autocast
from torch_xla.amp.grad_scaler import GradScaler as GradScaler
