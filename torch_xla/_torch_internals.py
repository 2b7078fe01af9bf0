"""All that this package takes of PyTorch that PyTorch does not promise to keep, in one place.

Each comment says what a part is for and, after "else", what there is where it is gone. What is replaced inside PyTorch,
as there is no registration for it, is replaced where that is needed; `tests/compat/test_imports.py` lists those places.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._python_dispatch
import torch.utils._pytree
from torch._C._dynamo import eval_frame as _eval_frame

OpOverload = torch._ops.OpOverload  # what `torch.ops.aten.add.Tensor` is; else that one's type
DispatchKey = torch._C.DispatchKey  # which kernel of an operator is meant; else keys' names, which most functions take
pytree = torch.utils._pytree  # nests of tensors, as PyTorch's tracers take them apart; else `optree`
register_device_module = torch._register_device_module  # of `torch.xla`; else an attribute and a key of `sys.modules`

# Whether an operator's name has a kernel for a key, or one that is computed for it; else ask the overload itself.
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
has_computed_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key

# A mode over all operators, and scopes without what a program has set up for its own calls; else it sees ours.
TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
no_dispatch_modes = torch.utils._python_dispatch._disable_current_modes
no_torch_function = torch._C.DisableTorchFunction
no_autocast = torch._C._DisableAutocast
transforms_are_active = torch._C._are_functorch_transforms_active  # `vmap` and others; else an operator raises there

# What `torch.compiler.disable` ends up with; else that one, which imports the compiler: that takes seconds.
set_code_strategy = _eval_frame.set_code_exec_strategy
SKIP_FRAME = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)

# How exactly products are computed, in the shortest way; else the settings in `torch.backends`.
matmul_precision = torch._C._get_float32_matmul_precision
convolutions_use_tf32 = torch._C._get_cudnn_allow_tf32
fp32_precision = torch._C._get_fp32_precision_getter

# The backward pass under way, or -1; what runs at its end; hooks on what is saved for one; else hooks of each gradient.
backward_pass = torch._C._current_graph_task_id
at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback
saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks

python_state = torch._utils._get_obj_state  # attributes of a tensor, which PyTorch's pickling keeps; else `vars`

# What `import torch` may not have imported yet: the places of a name, of which the first that has it is taken.
_LATE = {
    "descriptors": "torch._functorch._aot_autograd",  # notes of a graph's outputs; else each graph is a program
    "default_partition": "torch._functorch.partitioners",  # what a backward pass keeps; else `functorch.compile` has it
    "enable_python_dispatcher": "torch._dispatch.python",  # knows which kernels write unsaid; else a rule
    "decomposition_table": "torch._decomp",  # else `torch.export.default_decompositions()`, which imports the compiler
    "FakeProcessGroup": "torch._C._distributed_c10d",  # gives each what one process gave; else one of our own
    "lookup_backend": "torch._dynamo.backends.registry",  # of `torch.compile`, by name; else what is registered for it
    "op_implementations_checks": "torch._subclasses.fake_impls",  # of fake tensors; else these have no index on xla
    # `torch.while_loop` as an operator; else it runs turn by turn.
    "while_loop_dense": "torch._higher_order_ops.while_loop",
    "while_loop_op": "torch._higher_order_ops.while_loop",
    # What sizes are made of that an exported program leaves open; else such programs are refused.
    "functions": "torch.utils._sympy",
    "SymT": "torch.utils._sympy.symbol",
    "symbol_is_type": "torch.utils._sympy.symbol",
    "_decomposed": "torch.ao.quantization.fx",  # operators `torch.ops.quantized_decomposed`; else torchao's
    "Reducer": "torch._C._distributed_c10d",  # of DistributedDataParallel; else the order of its buckets is a read
    "_rendezvous_handlers": "torch.distributed.rendezvous",  # make stores, by scheme; else Gloo's keys are of all tries
    "_math_ops": "torch.distributed.tensor._ops",  # DTensor's rules of reductions; else PyTorch's fault is seen
    # What DTensor asks of a tensor; else of a DTensor that is made of its parts.
    "DTensorSpec": "torch.distributed.tensor._dtensor_spec",
    "TensorMeta": "torch.distributed.tensor._dtensor_spec",
    # Checkpoints on any file system; public from PyTorch 2.15 on.
    "FsspecReader": "torch.distributed.checkpoint torch.distributed.checkpoint._fsspec_filesystem",
    "FsspecWriter": "torch.distributed.checkpoint torch.distributed.checkpoint._fsspec_filesystem",
}


def __getattr__(name: str) -> Any:
    for place in _LATE.get(name, "").split():
        part = getattr(__import__(place, fromlist=[name]), name, None)
        if part is not None:
            return part
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
