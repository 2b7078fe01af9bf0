"""xla as what PyTorch calls the accelerator of a process."""

from torch_xla._core.torch import default_accelerator


def use_as_accelerator() -> None:
    """Makes xla the accelerator of this process, for programs that are written for whichever there is.

    From then on `torch.accelerator` tells of xla, ``init_process_group()`` and ``fully_shard(model)`` take it by
    default, ``device_id=`` and `torch.distributed.split_group` know it, and ``pin_memory`` copies. Each process of a
    job has one device, ``torch.accelerator.current_device_index()``. ``XLA_USE_AS_ACCELERATOR=1`` asks for it at the
    import of this package.
    """
    from torch_xla.distributed import xla_backend as xla_backend  # the device's backend, when it is registered

    default_accelerator.install()
