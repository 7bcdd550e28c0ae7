"""The only folder that imports private torch.
It has one function for each thing that is not public, or that differs between torch 2.11 and 2.15.
"""

from torch.utils._python_dispatch import TorchDispatchMode  # no other name is public
from torch.utils._triton import has_triton_package

from compiled_fsdp.compat.autograd import (
    address_of,
    at_end_of_backward,
    backward_id,
    concatenate_meshes,
    declare_gradient_dtype,
    dispatch_modes_active,
    dtensor_like,
    engine_runs,
    explain_unused_inputs,
    flattened_mesh,
    grad_dtype_set_on,
    in_checkpoint,
    is_cached_tensor,
    is_wrapper,
    local_of,
    no_modes,
    outside_of_autocast,
    outside_of_transforms,
    pop_saving_hooks,
    post_accumulate_grad_hooks,
    process_group_of,
    push_saving_hooks,
    running_node,
    saving_hooks,
    sequence_number,
    set_local,
    set_sequence_number,
    storage_id,
    store_of,
    strided_shard,
    use_count,
    without_torch_function,
)
from compiled_fsdp.compat.break_guards import forget_breaks, guard_breaks
from compiled_fsdp.compat.code_cache import LoadedCode, OnRun, cache_directory, code_caches_are_on
from compiled_fsdp.compat.compiled_autograd import compiled_autograd_of, compiled_autograd_runs, in_compiled_autograd
from compiled_fsdp.compat.compilers import aot_compile, check_inductor_options, inductor_compile, source_hash
from compiled_fsdp.compat.dynamo import (
    LimitReached,
    batch_of,
    break_graph,
    code_being_compiled,
    compile_past_recompile_limits,
    compiled_frames,
    compiling_is_on,
    dynamo_is_inspecting,
    forget_code,
    graph_break_of,
    graph_breaks,
    int_attribute_recompiled_for,
    is_dynamo_restart,
    is_resume_frame,
    mark_static,
    never_compiled,
    our_backend,
    skip_as_frame,
    skip_frames_of,
    trace_artifact,
    value_in_dynamo_graph,
)
from compiled_fsdp.compat.graphs import (
    UNKNOWN_SIZE,
    activation_share,
    computed_size,
    copy_of,
    expression,
    fake_mode_is_active,
    fake_mode_of,
    hint,
    hints_of,
    is_higher_order,
    min_cut_partition,
    needs_values,
    new_fake_mode,
    reorder,
    stable_topological_sort,
    strides_of,
    tensors_in,
)
from compiled_fsdp.compat.modules import (
    apply_to_tensors,
    chosen_by_wrap_policy,
    composable_state_of,
    fake_store,
    forwards_in_trace,
    forwards_on_stack,
    fsdp2_comm_context,
    fsdp2_state,
    has_spmd_types,
    hook_forward,
    innermost_forward,
    is_wrap_policy,
    register_forward_caller,
    register_torch_forward_methods,
    running_forwards,
    set_fsdp2_state,
    torch_fsdp_in_forward,
    torch_fsdp_type,
    torchs_fsdp2,
    tree_flatten,
    tree_map,
    tree_unflatten,
)
from compiled_fsdp.compat.nested_regions import (
    in_lasting_body,
    inline_nested_regions,
    keep_writes_after_bodies,
    notes_of_bodies,
)
from compiled_fsdp.compat.previews import (
    backends_of,
    before_code_runs,
    cause_in_backend,
    compile_arguments,
    dynamo_untouched,
    errors_at_graph_breaks,
    graph_break_in,
    graphs_in_front_of_breaks,
    is_break_of,
    uncompiled,
    uncompiled_call,
)
from compiled_fsdp.compat.profiling import (
    ProfiledEvent,
    called_through,
    functional_collectives,
    is_traced,
    profiled_events,
    profiler_runs,
)
from compiled_fsdp.compat.stances import stance_is_eager_on_recompile, watch_stances
from compiled_fsdp.compat.tracing import TracedObject, guard_on_result
from compiled_fsdp.compat.versions import check_version

check_version(__name__)
