"""Public paths of eager mode, of barriers that no one wrote, and of xla as the process's accelerator."""

from torch_xla.experimental.accelerator import use_as_accelerator as use_as_accelerator
from torch_xla.experimental.barriers import auto_barrier as auto_barrier
from torch_xla.experimental.eager import eager_mode as eager_mode
from torch_xla.experimental.eager import eager_mode_context as eager_mode_context
from torch_xla.experimental.eager import is_eager_mode as is_eager_mode
