"""Public paths of eager mode and of barriers that no one wrote."""

from torch_xla.experimental.barriers import auto_barrier as auto_barrier
from torch_xla.experimental.eager import eager_mode as eager_mode
from torch_xla.experimental.eager import eager_mode_context as eager_mode_context
from torch_xla.experimental.eager import is_eager_mode as is_eager_mode
