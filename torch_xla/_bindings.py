"""The one door to the native recorder: nothing else imports `torch_xla._C`."""

from __future__ import annotations

from torch_xla import _extension

_extension.load()  # which of several there may be

import torch_xla._C as _C  # noqa: E402

Cut = _C.Cut
Graph = _C.Graph
Calls = _C.Calls
Slot = _C.Slot
OperatorRun = _C.OperatorRun
StaleGraph = _C.StaleGraph
Packing = _C.Packing
Program = _C.Program
CapturedGraph = _C.CapturedGraph
ExecutableCache = _C.ExecutableCache

# Graphs and values.
node_sequence = _C.node_sequence
has_pending = _C.has_pending
buffer_of = _C.buffer_of
location_of = _C.location_of
copy_on_host = _C.copy_on_host
send_all_at_once = _C.send_all_at_once
tensor_of = _C.tensor_of
placeholder = _C.placeholder
place = _C.place
replace_buffer = _C.replace_buffer
placement_of = _C.placement_of
is_placeholder = _C.is_placeholder
tensor_id = _C.tensor_id
give_buffer = _C.give_buffer
is_given = _C.is_given
is_lost = _C.is_lost
storage_generation = _C.storage_generation
base_of = _C.base_of
set_storage = _C.set_storage
resize_storage = _C.resize_storage
live_tensors = _C.live_tensors
drain_released = _C.drain_released
begin_capture = _C.begin_capture
end_capture = _C.end_capture
is_captured = _C.is_captured
captures_here = _C.captures_here
RUNS_AHEAD = _C.RUNS_AHEAD
in_flight = _C.in_flight
exit_with_failure = _C.exit_with_failure
buffers_on = _C.buffers_on
lose_buffers = _C.lose_buffers
has_xla_type = _C.has_xla_type
in_eager_operation = _C.in_eager_operation
set_eager_operation = _C.set_eager_operation
host_kernel_target = _C.host_kernel_target
trusting_operators = _C.trusting_operators

# Loops without barriers.
LONGEST_STREAM = _C.LONGEST_STREAM
follow_streams = _C.follow_streams
follows_streams = _C.follows_streams
find_loop = _C.find_loop
calls_since_barrier = _C.calls_since_barrier
is_looping = _C.is_looping
nothing_found = _C.nothing_found
piece_ends = _C.piece_ends
drop_piece_ends = _C.drop_piece_ends
end_stream = _C.end_stream
was_cut = _C.was_cut
whole_comes = _C.whole_comes

# Collectives on CPUs.
collective_kernel_target = _C.collective_kernel_target
set_collective_rank = _C.set_collective_rank
add_collective_group = _C.add_collective_group
collective_wait = _C.collective_wait
stop_collectives = _C.stop_collectives

# What the recorder asks of Python, and how it records.
set_python_hooks = _C.set_python_hooks
set_eager = _C.set_eager
suspend_eager = _C.suspend_eager
is_eager = _C.is_eager
set_special_numbers = _C.set_special_numbers
call_settings = _C.call_settings
default_dtype = _C.default_dtype
demote_numbers = _C.demote_numbers
record_whole = _C.record_whole
keep_on_host = _C.keep_on_host
check_errors = _C.check_errors
refuse_packing = _C.refuse_packing
unboxed_kernels = _C.unboxed_kernels
set_frame_depth = _C.set_frame_depth
user_frame = _C.user_frame
thread_position = _C.thread_position
set_scope = _C.set_scope
add_skipped_prefix = _C.add_skipped_prefix
stand_in_for_torch = _C.stand_in_for_torch

# Counts.
op_counts = _C.op_counts
created_tensors = _C.created_tensors
destroyed_tensors = _C.destroyed_tensors
add_sample = _C.add_sample
note_wait = _C.note_wait
metric = _C.metric
metric_names = _C.metric_names
clear_metrics = _C.clear_metrics
shape_cache_misses = _C.shape_cache_misses

# Devices and random state.
set_device_count = _C.set_device_count
set_spans_mesh = _C.set_spans_mesh
device_count = _C.device_count
current_device = _C.current_device
set_current_device = _C.set_current_device
rng_state = _C.rng_state
set_rng_state = _C.set_rng_state


def library() -> str:
    """The file of the recorder."""
    return str(_C.__file__)
