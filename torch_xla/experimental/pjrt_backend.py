"""``init_method="pjrt://"``, the older name of what `torch_xla.distributed.xla_backend` registers as ``"xla://"``."""

from torch.distributed.rendezvous import register_rendezvous_handler

from torch_xla._internal import rendezvous
from torch_xla.distributed import xla_backend as xla_backend

register_rendezvous_handler("pjrt", rendezvous.pjrt_rendezvous_handler)
