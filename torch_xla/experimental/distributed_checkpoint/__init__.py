"""Checkpoints of split tensors, part by part, which load into other splits: planners and a manager for them."""

from torch_xla.experimental.distributed_checkpoint.manager import CheckpointManager
from torch_xla.experimental.distributed_checkpoint.planners import SPMDLoadPlanner, SPMDSavePlanner
from torch_xla.experimental.distributed_checkpoint.util import prime_optimizer

__all__ = ["CheckpointManager", "SPMDLoadPlanner", "SPMDSavePlanner", "prime_optimizer"]
