"""The sharding call, with FSDP2's signature. Its errors name the cause, and leave the module as it was."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from compiled_fsdp.compat.autograd import explain_unused_inputs, no_modes
from compiled_fsdp.compat.break_guards import guard_breaks
from compiled_fsdp.compat.dynamo import skip_our_frames
from compiled_fsdp.compat.modules import fsdp2_state
from compiled_fsdp.compat.stances import watch_stances
from compiled_fsdp.frontend.auto_wrap import units_by_policy
from compiled_fsdp.frontend.checks import (
    check_modules,
    check_wrapped,
    layouts_of,
    managed_modules,
    names_of,
    places_of,
    root_modules,
)
from compiled_fsdp.frontend.forward_hooks import ForwardHooks
from compiled_fsdp.frontend.fsdp_module import FSDPModule
from compiled_fsdp.frontend.gradient_methods import units_of
from compiled_fsdp.frontend.optimizer_hooks import sharded_from, watch_optimizers
from compiled_fsdp.frontend.parametrize import change_class
from compiled_fsdp.frontend.pipelining import answer_as_fsdp2, expect_fsdps_mark
from compiled_fsdp.frontend.refresh import refresh
from compiled_fsdp.frontend.undo import remember
from compiled_fsdp.frontend.unshard import reshard_owned
from compiled_fsdp.frontend.unused_inputs import why_unused
from compiled_fsdp.ranks.liveness import sign_in
from compiled_fsdp.runtime.gate import give_gate
from compiled_fsdp.sharding.extension import HookArguments
from compiled_fsdp.sharding.full_mesh import full_mesh_of
from compiled_fsdp.sharding.mesh import (
    broadcast_states,
    check_mesh,
    check_reshard_after_forward,
    device_of,
    only_replicates,
)
from compiled_fsdp.sharding.mesh import post_forward_group as post_forward_group_of
from compiled_fsdp.sharding.offload import offload_of
from compiled_fsdp.sharding.precision import casts_inputs, check_policy, dtypes_of
from compiled_fsdp.sharding.wire_policy import WirePolicy, check_wire_policy
from compiled_fsdp.state.comm_policy import CommPolicy
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.registry import register, unit_of, unregister
from compiled_fsdp.state.unit import Unit

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
    from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

    # returns a Shard, None, or a ShardPlacementResult, which is private in torch
    ShardPlacementFn = Callable[[nn.Parameter], Any]
    WrapPolicy = ModuleWrapPolicy | CustomPolicy | Callable[..., bool]


M = TypeVar("M", bound=nn.Module)


@overload
def fully_shard(module: nn.Module, *, mesh: DeviceMesh | None = ..., reshard_after_forward: bool | int | None = ...,
                shard_placement_fn: ShardPlacementFn | None = ..., mp_policy: MixedPrecisionPolicy | None = ...,
                offload_policy: OffloadPolicy | None = ..., ignored_params: set[nn.Parameter] | None = ...,
                dp_mesh_dims: DataParallelMeshDims | None = ..., sync_module_states: bool = ...,
                auto_wrap_policy: WrapPolicy | None = ...,
                wire_policy: WirePolicy | None = ...) -> FSDPModule: ...  # fmt: skip
@overload
def fully_shard(module: list[M], *, mesh: DeviceMesh | None = ...,
                reshard_after_forward: bool | int | None = ..., shard_placement_fn: ShardPlacementFn | None = ...,
                mp_policy: MixedPrecisionPolicy | None = ..., offload_policy: OffloadPolicy | None = ...,
                ignored_params: set[nn.Parameter] | None = ..., dp_mesh_dims: DataParallelMeshDims | None = ...,
                sync_module_states: bool = ..., auto_wrap_policy: None = ...,
                wire_policy: WirePolicy | None = ...) -> list[FSDPModule]: ...  # fmt: skip


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    sync_module_states: bool = False,
    auto_wrap_policy: WrapPolicy | None = None,
    wire_policy: WirePolicy | None = None,
) -> Any:
    """Shard the parameters of ``module`` over ``mesh``, in place, and return it.

    For example::

        for layer in model.layers:
            fully_shard(layer)  # each is a unit; if you call it on the root only, the planner divides the model itself
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model.compile(backend="compiled_fsdp")

    Every parameter becomes a DTensor with the same name, shape and dtype, split by rows. A forward of the module reads
    it in full. The module and those modules inside that are not sharded yet form one *unit*. Call it on the root alone,
    or on each layer and then on the root, as with FSDP2. Build the optimizer afterwards.

    Args:
        module: a module, or a list of modules that form one unit.
        mesh: a 1-D device mesh (default: all ranks); or a 2-D mesh with named dimensions, which replicates over its
            first dimension and shards over the second (HSDP). It may be a slice of a larger mesh. Parameters that are
            DTensors on another slice of the same mesh (tensor parallelism) stay so in forward, and are sharded once
            more.
        reshard_after_forward: True: gather parameters again in backward. False: keep them from forward to backward.
            None: False for a root, else True. An integer n, a factor of the number of shards: keep each parameter
            sharded over groups of n ranks from forward to backward, so that backward gathers inside of a group. For
            example, n = 8 of 64 ranks gathers inside of a node with 8 GPUs.
        shard_placement_fn: called with each parameter; returns the ``Shard`` that it gets, None for ``Shard(0)``, or,
            with torch 2.13, a ``ShardPlacementResult`` for a mesh of its own. A sharded dimension other than the first
            must be divisible by the number of shards.
        mp_policy: dtypes of computation, reduction, inputs and outputs. Shards, gradients and the optimizer's state
            keep the parameters' dtype. Without ``reduce_dtype``, gradients are reduced in the parameters' dtype, as
            with FSDP2 of torch 2.15.
        offload_policy: ``CPUOffloadPolicy`` keeps shards, gradients and optimizer state in host memory.
        ignored_params: parameters that stay unsharded on every rank. Their gradients are not reduced.
        dp_mesh_dims: the data-parallel dimensions of ``mesh``, if the parameters are DTensors on the whole mesh (torch
            2.13). If they are only dimensions to replicate over, parameters stay whole, as with ``replicate``.
        sync_module_states: first broadcast parameters and buffers from the mesh's first rank, as FSDP1's option does.
            Without it all ranks, replicas too, must have built equal modules.
        auto_wrap_policy: a policy of FSDP1, for a single module: each module inside that the policy chooses becomes a
            unit, inner ones first, and then ``module``, all with the same arguments. A policy is a ``ModuleWrapPolicy``
            of ``torch.distributed.fsdp.wrap``; a ``CustomPolicy``, whose dictionaries override these arguments for one
            unit; or a callable ``(module, recurse, nonwrapped_numel) -> bool`` such as ``size_based_auto_wrap_policy``
            (give its further arguments with ``functools.partial``). Modules that are sharded already are left alone.
        wire_policy: a ``WirePolicy`` with codecs for gathers and reductions, which send fewer bytes and are not exact.
            None sends parameters and gradients as they are.

    Raises:
        ValueError: a module or parameter cannot be sharded, the mesh does not fit, or a policy argument is not a
            policy. The message names it.
        RuntimeError: there is no process group, or the device is missing.
        NotImplementedError: compiled_fsdp does not support an option of FSDP2 yet. The message names it.

        If it raises, ``module`` is as it was before the call.
    """
    arguments = Arguments(
        mesh, reshard_after_forward, shard_placement_fn, mp_policy, offload_policy, ignored_params, dp_mesh_dims,
        sync_module_states, wire_policy,
    )  # fmt: skip
    return shard_units(module, arguments, auto_wrap_policy)


def shard_units(module: Any, arguments: Arguments, auto_wrap_policy: WrapPolicy | None) -> Any:
    """Make ``module``, and the modules inside that the policy chooses, units; return ``module``."""
    units = [(module, arguments)]
    if auto_wrap_policy is not None:
        kept = (
            ("replicates", "reshard_after_forward", "shard_placement_fn") if arguments.replicates else ("replicates",)
        )
        open_to_policy = {name: value for name, value in arguments._asdict().items() if name not in kept}
        chosen = units_by_policy(module, auto_wrap_policy, open_to_policy)
        units = [(unit, arguments._replace(**of_unit)) for unit, of_unit in chosen]
    checked = _Checked(module, set(), {})
    with ExitStack() as undo:
        steps = [_shard(unit, checked, of_unit, undo) for unit, of_unit in units]
        for step in steps:
            next(step)
        for root in root_modules(module):
            remember(root, undo)
        for step in steps:
            next(step, None)
        undo.pop_all()
    return module


# FSDP2's ``fully_shard.state(module)`` returns a module's state. Both functions do so, whichever sharded the module.
cast("Any", fully_shard).state = fsdp2_state


class Arguments(NamedTuple):
    """The arguments of ``fully_shard`` or ``replicate`` for one unit; a policy may override them for some units."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: ShardPlacementFn | None
    mp_policy: MixedPrecisionPolicy | None
    offload_policy: OffloadPolicy | None
    ignored_params: set[nn.Parameter] | None
    dp_mesh_dims: DataParallelMeshDims | None
    sync_module_states: bool
    wire_policy: WirePolicy | None
    # Whether ``mesh`` has no dimension to shard over.
    replicates: bool = False


class _Checked(NamedTuple):
    """The units of one call that are checked and not sharded yet."""

    # The module, or list of modules, that the call was given. Names of parameters start there.
    given: Any
    # The units' own modules.
    modules: set[nn.Module]
    # The units' parameters, with their names.
    parameters: dict[nn.Parameter, str]


def _shard(module: Any, checked: _Checked, given: Arguments, undo: ExitStack) -> Iterator[None]:
    """Shard one unit in two steps: check it up to ``yield``, and change it after that.

    Args:
        module: the unit's module, or a list of its modules.
        checked: the units of the call that are checked already; this one is added.
        given: the arguments for this unit.
        undo: gets callbacks that undo changes outside of the modules.
    """
    mp_policy = given.mp_policy
    with no_modes():  # because a mesh computes with tensors of its own, which are real even if the model is fake
        roots = root_modules(module)
        check_modules(roots)
        mesh = check_mesh(given.mesh, given.dp_mesh_dims, replicates=given.replicates)
        full_mesh = full_mesh_of(given.mesh, given.dp_mesh_dims)
        replicates = given.replicates or only_replicates(given.dp_mesh_dims)
        check_reshard_after_forward(given.reshard_after_forward, mesh, replicates=replicates)
        if mp_policy is not None:
            check_policy(mp_policy)
        hook_arguments = HookArguments.of(mesh, mp_policy)
        wire = check_wire_policy(given.wire_policy, replicates=replicates)
        offload = offload_of(given.offload_policy)
        device = device_of(mesh)
        managed = managed_modules(roots, checked.modules)
        ignored = given.ignored_params or set()
        places = places_of(managed, ignored)
        names = names_of(checked.given, places)
        layouts = layouts_of(places, names, given.shard_placement_fn, mesh, full_mesh, replicates, checked.parameters)
        check_wrapped(places, names, layouts, given.reshard_after_forward, wire)
        dtypes = {param: dtypes_of(names[param], param, mp_policy) for param in places}
        checked.modules.update(roots)
        checked.parameters.update(names)

    # Nothing has been changed up to here.
    yield
    source = mesh if given.sync_module_states else None
    parameters = []
    for param, where in places.items():
        values = _to_shard(param, device, source)
        parameter = ShardedParameter(
            values, where, layouts[param], dtypes[param], device, hook_arguments, offload, wire
        )
        for owner, attribute in where:
            owner._parameters[attribute] = parameter.param
        undo.callback(sharded_from.pop, param, None)
        sharded_from[param] = parameter
        if param.requires_grad:
            undo.callback(param.register_post_accumulate_grad_hook(_refuser(weakref.ref(parameter))).remove)
        parameters.append(parameter)
    _move_buffers(managed, device, source, undo)
    unit = Unit(tuple(roots), parameters, _policy(mesh, given.reshard_after_forward, mp_policy))
    undo.callback(unregister, unit)
    register(unit)
    for parameter in parameters:
        give_gate(parameter, unit)
    for root in roots:
        unit.take_in(units_of(root))
    hooks = ForwardHooks(unit)
    _change_classes(roots, parameters, hooks)
    answer_as_fsdp2(hooks)
    expect_fsdps_mark(managed)
    for root in roots:
        for any_unit in units_of(root):
            any_unit.name_from(root)
    for group in {parameter.group for parameter in parameters}:
        sign_in(group)  # from here on other ranks notice if this process ends
    hooks.register()
    watch_optimizers()
    explain_unused_inputs(why_unused)
    guard_breaks()
    watch_stances()
    skip_our_frames()


def _policy(
    mesh: DeviceMesh, reshard_after_forward: bool | int | None, mp_policy: MixedPrecisionPolicy | None
) -> CommPolicy:
    policy = CommPolicy(
        input_dtype=casts_inputs(mp_policy), output_dtype=None if mp_policy is None else mp_policy.output_dtype
    )
    if type(reshard_after_forward) is int:
        # the integer 1 means False, and the number of shards means True
        policy.post_forward_group = post_forward_group_of(mesh, reshard_after_forward)
        reshard_after_forward = reshard_after_forward != 1
    policy.reshard_after_forward = cast("bool | None", reshard_after_forward)
    return policy


# ---- changes to parameters, buffers and classes ----------------------------------------------------------------------
def _to_shard(param: nn.Parameter, device: torch.device, source: DeviceMesh | None) -> nn.Parameter:
    """The parameter on ``device`` from which the shard is cut, with the values of ``source``'s first rank, if given.

    ``param`` itself stays as it is.
    """
    is_there = param.device in (device, torch.device("meta"))
    if is_there and source is None:
        return param
    values = param.detach().clone() if is_there else param.detach().to(device)
    if source is not None:
        broadcast_states([values], source)
    return nn.Parameter(values, requires_grad=param.requires_grad)


def _move_buffers(managed: list[nn.Module], device: torch.device, source: DeviceMesh | None, undo: ExitStack) -> None:
    for buffer in (buffer for module in managed for buffer in module.buffers(recurse=False)):
        undo.callback(setattr, buffer, "data", buffer.data)
        if buffer.device not in (device, torch.device("meta")):
            buffer.data = buffer.to(device)
        elif source is not None:
            buffer.data = buffer.clone()
        if source is not None:
            broadcast_states([buffer], source)


def _change_classes(roots: list[nn.Module], parameters: list[ShardedParameter], hooks: ForwardHooks) -> None:
    reads: dict[nn.Module, dict[str, ShardedParameter]] = {root: {} for root in roots}
    for parameter in parameters:
        for module, name in parameter.live_places():
            reads.setdefault(module, {})[name] = parameter
    for module, of_module in reads.items():
        change_class(module, of_module, hooks.unit, hooks if module in roots else None)
        handles = (
            module.register_state_dict_pre_hook(reshard_owned),
            module.register_load_state_dict_pre_hook(_refuse_plain_tensors),
            module.register_load_state_dict_post_hook(_refresh_loaded),
        )
        known = module.__dict__.get("_fsdp_hook_ids", frozenset())
        module.__dict__["_fsdp_hook_ids"] = known.union(handle.id for handle in handles)


def _refuse_plain_tensors(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    # asked first: if the model is unsharded, DCP's helper has already made plain tensors like the full parameters
    full = any(unit_of(parameter).unsharding is not None for parameter in module._fsdp_reads.values())
    reshard_owned(module)
    for name in module._fsdp_reads:
        value = state_dict.get(prefix + name)
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            instead = "; call reshard() before, since the model was unshard()ed." if full else "."
            raise ValueError(
                f"load_state_dict: {prefix + name!r} is a plain tensor, but the parameter is sharded: a DTensor is "
                "expected. Load a full state dict with "
                "torch.distributed.checkpoint.state_dict.set_model_state_dict(model, state_dict, "
                f"options=StateDictOptions(full_state_dict=True)){instead}"
            )


def _refresh_loaded(module: Any, incompatible_keys: Any) -> None:
    for parameter in module._fsdp_reads.values():
        refresh(parameter)
        parameter.grads.residual = None  # it belongs to gradients of the values before loading


def _refuser(sharded: weakref.ref[ShardedParameter]) -> Callable[[torch.Tensor], None]:
    """Make a hook that raises if a gradient reaches the original parameter, because training it has no effect."""

    def refuse(param: torch.Tensor) -> None:
        parameter = sharded()
        if parameter is None:  # the sharded model is deleted, so other code may train the old parameter
            return
        name = parameter.name
        raise RuntimeError(
            f"compiled_fsdp: a gradient reached the unsharded {name!r}, which the model had before fully_shard. "
            "Something still computes with it: a list, a closure or another module that holds the old parameter. Read "
            f"it as the module's attribute ({name!r} of the sharded model) where it is used, or make the list after "
            "fully_shard, inside forward."
        )

    return refuse
