"""All that the FSDP2 of each supported torch has, and what becomes of it here.

A torch with a new method, argument, hook or attribute makes a test of this file fail: decide what becomes of it here,
write that down, and test it where its subject is.
"""

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import compiled_fsdp
from compiled_fsdp import FSDPModule, fully_shard
from compiled_fsdp.frontend.gradient_methods import GradientMethods
from tests.harness.fake import fake_group

# ---- methods of a sharded module -------------------------------------------------------------------------------------
SAME = """
    finalize_backward reset_iter_state reshard set_force_sum_reduction_for_comms set_gradient_divide_factor
    set_manual_backward_finalization set_modules_to_backward_prefetch set_modules_to_forward_prefetch
    set_post_optim_event set_reduce_scatter_divide_factor set_reduce_scatter_unused_params set_requires_all_reduce
    set_requires_gradient_sync set_reshard_after_backward set_reshard_after_forward set_separate_reduce_scatter_group
    unshard
"""
"""With the arguments of FSDP2, and its results."""
ACCEPTED = "set_is_last_backward set_unshard_in_backward _set_unshard_async_op"
"""There is nothing to do."""
REFUSED = {
    "set_custom_all_gather": (None,),
    "set_custom_reduce_scatter": (None,),
    "set_all_reduce_hook": (print,),
    "set_allocate_memory_from_process_group_for_comm": (True,),
    "set_symm_mem_for_comm": (),
    "set_keep_unsharded_storage": (True,),
    "set_reduce_scatter_max_input_buffers": (2,),
}
"""They tune FSDP2's own runtime: NotImplementedError, with these arguments."""
OF_THE_CLASS = "_apply _get_fsdp_state _orig_cls_mro_index"
"""For torch's own code."""

# ---- what can be given -----------------------------------------------------------------------------------------------
ARGUMENTS = """
    dp_mesh_dims ignored_params mesh module mp_policy offload_policy reshard_after_forward shard_placement_fn
"""
"""Of `fully_shard`."""
POLICIES = {
    "MixedPrecisionPolicy": "cast_forward_inputs output_dtype param_dtype param_dtype_override_fn reduce_dtype",
    "OffloadPolicy": "",
    "CPUOffloadPolicy": "pin_memory",
}
"""Their fields, all of which have a meaning here."""
NAMES = """
    CPUOffloadPolicy DataParallelMeshDims FSDPModule GradientReductionHandle MixedPrecisionPolicy OffloadPolicy
    UnshardHandle fully_shard register_fsdp_forward_method share_comm_ctx
"""
"""Of `torch.distributed.fsdp`, without FSDP1's: replaced by `install()`, or taken from torch as they are."""
HOOKS = {
    "fsdp_pre_all_gather": "called",
    "fsdp_post_all_gather": "called",
    "fsdp_should_release_all_gather_outputs_after_post_all_gather": "no meaning: what nothing holds is freed at once",
}
"""Of a parameter's tensor, which FSDP2 calls where they are there."""
OF_PARAMETERS = {
    "_fsdp_orig_uid": "not set: a parameter that is in two units is refused when the second one is sharded",
    "_has_grad_dtype_override": "read",
    "grad_dtype": "read",
    "requires_grad": "read",
}
"""What FSDP2's source reads or sets of a parameter."""
OF_ANY_TENSOR = """
    _local_tensor _spec data device dtype grad is_contiguous itemsize ndim numel requires_grad_ shape size stride
    untyped_storage sharded_size unsharded_grad_data unsharded_param unsharded_zero_grad_data
"""
"""The same, where nothing is asked of a user's parameter: of tensors, and of FSDP2's own object, named so as well."""

# ---- FSDP2's own objects ---------------------------------------------------------------------------------------------
ANSWERED = {
    "FSDPState": "_comm_ctx _fsdp_param_group _fsdp_param_groups _post_forward _pre_forward "
    "_root_post_backward_final_callback _state_ctx",
    "FSDPParamGroup": "comm_ctx",
    "FSDPStateContext": "all_states",
    "FSDPCommContext": None,
}
"""What torch's functions and pipeline schedules ask for; None: it is torch's own object."""
RUNTIME = {
    "FSDPState": """
        _auto_reshard_after_forward _cast_forward_inputs _cast_output_dtype _device _device_handle
        _end_backward_iteration _finalize_backward _force_complete_incomplete_states _get_state_for_module _init_fqns
        _init_shared_state _is_root _lazy_init _modules _modules_to_run_forward _mp_policy _post_forward_hook_handle
        _pre_backward _pre_forward_hook_handle _register_pre_backward_hook _register_root_post_backward_final_callback
        _reset_iter_state _root_pre_forward _state_name _states_to_backward_prefetch _states_to_forward_prefetch
        _training_state _validate_finalize_backward _validate_no_duplicate_params finalize_backward init
        wait_for_gradient_reduction
    """,
    "FSDPParamGroup": """
        _all_gather_comm _all_gather_output _all_gather_output_fn _all_gather_process_group _all_gather_result
        _all_reduce_hook _all_reduce_hook_stream _all_reduce_process_group _all_reduce_state _backward_prefetch
        _fsdp_params_with_wider_grad_dtype _get_partial_reduce_grad _get_reduce_dtype _get_unsharded_grad_to_reduce
        _init_mp_dtypes _init_reduce_scatter_param_order _is_hsdp _module_fqn _module_to_pre_load_state_dict_hook_handle
        _module_to_pre_save_state_dict_hook_handle _num_param_groups _orig_dtype _param_group_index
        _partial_reduce_output _partial_reduce_output_layout _post_backward_pending _post_forward_indices
        _post_reduce_event _prefetch_unshard _prepare_partial_reduce_output _prepare_reduce_scatter_inputs
        _record_post_forward _reduce_dtype _reduce_scatter_comm _reduce_scatter_param_indices
        _reduce_scatter_process_group _register_post_backward_hook _register_state_dict_hooks _reset_iter_state
        _reset_sharded_params _reshard_after_forward _reshard_after_forward_event _set_separate_reduce_scatter_group
        _set_unsharded_grad_dtypes _sharded_state _take_unsharded_grads_to_reduce _to_sharded _to_sharded_post_forward
        _to_unsharded _training_state _use_post_forward_mesh _validate_cpu_offload_params _validate_no_meta_params
        _validate_reduce_scatter_max_input_buffers _validate_unused_param_grad_dtypes _wait_all_gather_streams_on_event
        _wait_for_post_backward _with_fqn all_reduce_grads device device_handle finalize_backward
        force_sum_reduction_for_comms fsdp_params gradient_divide_factor is_sharded is_sharded_post_forward is_unsharded
        lazy_init mesh_info modules mp_policy offload_policy post_backward post_forward post_forward_mesh_info
        pre_backward pre_forward reduce_grads reduce_scatter_max_input_buffers reduce_scatter_unused_params reshard
        reshard_after_backward set_allocate_memory_from_process_group set_symm_mem unshard unshard_async_op
        unshard_in_backward use_training_state wait_for_unshard
    """,
    "FSDPStateContext": """
        gradient_reduction_pending is_last_backward iter_forward_root manual_backward_finalization
        manual_backward_finalization_active post_backward_final_callback_queued post_optim_event
    """,
    "FSDPCommContext": """
        _last_post_reduce_events active_gradient_reduction all_gather_copy_in_stream all_gather_state all_gather_stream
        all_reduce_stream device_handle get_all_gather_streams lazy_init post_forward_order
        reduce_scatter_max_input_buffers reduce_scatter_state reduce_scatter_states reduce_scatter_stream
        release_all_gather_state_for_comm_reuse release_all_gather_state_on_current_stream
        wait_all_gather_streams_on_event
    """,
    "FSDPParam": """
        _assert_in_states _build_spmd_sharding_spec _capture_grad_dtype_policy _contiguous_orig_stride
        _get_grad_inner_tensor _get_unsharded_dtensor_spec _has_sharded_grad_dtype_override _init_extensions
        _init_shard_mesh _init_sharded_param _init_sharded_post_forward_param_metadata _init_sharding_spec
        _init_sharding_spec_plain _init_sharding_spec_spmd _init_sharding_spec_tp _module_info _orig_param_uid
        _orig_size _param_fqn _post_load_hook_handle _release_all_gather_outputs_after_post_all_gather
        _release_all_gather_outputs_if_needed _resolve_spmd_types_for_storage _restore_spmd_types _setattr_on_modules
        _shard_mesh _sharded_local_tensor _sharded_param_data _sharding_spec _sharding_spec_by_dtype _spmd_mesh
        _spmd_placements _unflatten_all_gather_outputs _unsharded_dtensor_spec _unsharded_inner_tensors _unsharded_param
        accumulate_unsharded_grad_if_needed all_gather_inputs all_gather_outputs alloc_all_gather_outputs
        contiguous_sharded_post_forward_stride contiguous_sharded_stride device free_all_gather_outputs
        free_unsharded_param fsdp_placement grad_offload_event init_all_gather_outputs init_dtype_attrs
        init_unsharded_param is_dtensor is_spmd_types keep_unsharded_storage may_reduce_grad_outside_dp mesh_info
        mp_policy offload_to_cpu orig_dtype padded_sharded_param_size param_dtype pin_memory post_forward_mesh_info
        reduce_dtype reset_sharded_param shard_mesh shard_mesh_from_root sharded_grad_dtype sharded_param
        sharded_post_forward_size sharded_size sharded_state to_accumulated_grad_if_needed to_sharded to_sharded_dtensor
        to_sharded_post_forward to_sharded_post_forward_dtensor to_unsharded unsharded_accumulated_grad
        unsharded_accumulated_grad_data unsharded_grad_data unsharded_grad_dtype unsharded_param
        unsharded_zero_grad_data
    """,
}
"""What else they have: an AttributeError that says what to call. There is no FSDPParam here."""


def sources() -> Iterator[str]:
    """FSDP2's code, without comments and docstrings."""
    for path in sorted((Path(torch.distributed.fsdp.__file__).parent / "_fully_shard").glob("*.py")):
        yield ast.unparse(ast.parse(re.sub(r'""".*?"""', '""', path.read_text(), flags=re.DOTALL)))


def attributes(thing: Any) -> set[str]:
    """Of an object and of the classes of FSDP2 that it is of."""
    classes = [cls for cls in type(thing).__mro__ if cls.__module__.startswith("torch.distributed.")]
    found = {name for cls in classes for name in vars(cls)} | set(vars(thing))
    return {name for name in found if not re.fullmatch(r"__\w+__|_abc_impl", name)}


def test_methods():
    found = {name for name in vars(torch.distributed.fsdp.FSDPModule) if not name.startswith("__")}
    known = {*SAME.split(), *ACCEPTED.split(), *REFUSED, *OF_THE_CLASS.split()}
    assert found <= known, f"new in torch {torch.__version__}: {sorted(found - known)}"
    own = {**vars(GradientMethods), **vars(FSDPModule)}
    with fake_group(2):
        model = fully_shard(nn.Linear(4, 4))
        assert {*known, *vars(type(model))} - {"_apply"} <= {*own, *vars(type(model))}, "inherited from FSDP2"
        assert "_apply" in vars(type(model))
        for name, arguments in REFUSED.items():
            with pytest.raises(NotImplementedError, match=rf"{name}\(\) has no meaning here: .*\. Leave the call out"):
                getattr(model, name)(*arguments)
    for name in (*SAME.split(), *ACCEPTED.split()):
        if (theirs := vars(torch.distributed.fsdp.FSDPModule).get(name)) is not None:
            mine, expected = (list(inspect.signature(each).parameters) for each in (own[name], theirs))
            assert mine[: len(expected)] == expected, name


def test_what_can_be_given():
    for name, fields in POLICIES.items():
        found = {field.name for field in dataclasses.fields(getattr(torch.distributed.fsdp, name))}
        assert found <= set(fields.split()), name
    found = set(inspect.signature(torch_fully_shard).parameters)
    assert found <= set(ARGUMENTS.split()) <= set(inspect.signature(fully_shard).parameters)
    assert set(vars(torch_fully_shard)) - {"__wrapped__"} == {"state"} <= set(vars(fully_shard))
    modules = [value for value in vars(torch.distributed.fsdp).values() if isinstance(value, ModuleType)]
    (module,) = [module for module in modules if module.__name__.endswith("._fully_shard")]
    found = {name for name in vars(module) if not name.startswith("_")}
    assert found <= set(NAMES.split()), f"new in torch {torch.__version__}: {sorted(found - set(NAMES.split()))}"
    own = {"FSDPModule", "fully_shard", "register_fsdp_forward_method", "share_comm_ctx"}
    assert all(hasattr(compiled_fsdp, name) for name in own)


def test_hooks_and_attributes_of_parameters():
    code = "\n".join(sources())
    asked = re.findall(r"(?:getattr|hasattr)\([\w.]+, '(\w+)'", code)
    hooks = {name for name in asked if name.startswith("fsdp_")}
    assert hooks <= set(HOOKS), f"new in torch {torch.__version__}: {sorted(hooks - set(HOOKS))}"
    found = set(re.findall(r"(?<![\w.])(?:self\.)?_?(?:sharded_|unsharded_|new_|dtensor_|orig_)?param\.(\w+)", code))
    assert {"requires_grad", "_local_tensor"} <= found
    known = {*OF_PARAMETERS, *OF_ANY_TENSOR.split()}
    assert found <= known, f"new in torch {torch.__version__}: {sorted(found - known)}"


def test_fsdp2s_objects():
    """A new attribute of FSDP2's parameter, group or state is often a new feature."""
    with fake_group(2):
        theirs, mine = torch_fully_shard(nn.Linear(4, 4)), fully_shard(nn.Linear(4, 4))
        theirs(torch.ones(1, 4)).sum().backward()
        state, own = theirs._get_fsdp_state(), mine._get_fsdp_state()
        group = state._fsdp_param_group
        objects = {
            "FSDPState": (state, own),
            "FSDPParamGroup": (group, own._fsdp_param_group),
            "FSDPStateContext": (state._state_ctx, own._state_ctx),
            "FSDPCommContext": (state._comm_ctx, own._comm_ctx),
            "FSDPParam": (group.fsdp_params[0], None),
        }
        for name, (thing, stand_in) in objects.items():
            assert type(thing).__name__ == name
            answered, runtime = ANSWERED.get(name, ""), set(RUNTIME[name].split())
            found = attributes(thing)
            known = runtime | set((answered or "").split())
            assert found <= known, f"new in torch {torch.__version__}: {name}.{sorted(found - known)}"
            if answered is None:
                assert type(stand_in) is type(thing)
                continue
            for attribute in answered.split() if stand_in is not None else ():
                if attribute != "comm_ctx":  # there once it is shared
                    assert getattr(stand_in, attribute) is not None, attribute
            for attribute in runtime if stand_in is not None else ():
                with pytest.raises(AttributeError, match=rf"compiled_fsdp: '[\w ]+\.{attribute}' of torch's FSDP2"):
                    getattr(stand_in, attribute)
                with pytest.raises(AttributeError, match=rf"compiled_fsdp: '[\w ]+\.{attribute}' of torch's FSDP2"):
                    setattr(stand_in, attribute, None)


@pytest.mark.skipif(not hasattr(torch.distributed, "_is_spmd_types_available"), reason="from torch 2.15 on")
def test_types_of_spmd_types_are_refused(monkeypatch):
    """FSDP2 keeps what the package `spmd_types` says of a parameter, from torch 2.15 on; without it a type checker
    would be told nothing."""
    stub = ModuleType("spmd_types")
    stub.get_local_type = lambda param: {"dp": "R"} if param.dim() > 1 else None
    monkeypatch.setitem(sys.modules, "spmd_types", stub)
    with fake_group(2):
        model = nn.Linear(4, 4)
        monkeypatch.setattr(torch.distributed, "_is_spmd_types_available", lambda: True)
        with pytest.raises(NotImplementedError, match="'weight' of Linear has annotations of spmd_types"):
            fully_shard(model)
        fully_shard(model, ignored_params={model.weight}, mp_policy=MixedPrecisionPolicy())
