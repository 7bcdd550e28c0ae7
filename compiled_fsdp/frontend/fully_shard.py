"""The sharding call: FSDP2's signature, and named errors before anything is changed."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.weak import WeakTensorKeyDictionary

from compiled_fsdp.compat import composable_state_of, fsdp2_state, torch_fsdp_type
from compiled_fsdp.frontend.auto_wrap import units_by_policy
from compiled_fsdp.frontend.fsdp_module import FSDPModule, reshard, shard_class, units_of
from compiled_fsdp.frontend.optimizer_hooks import watch_optimizers
from compiled_fsdp.frontend.pipelining import answer_as_fsdp2, expect_fsdps_mark
from compiled_fsdp.sharding.full_mesh import FullMesh, full_mesh_of
from compiled_fsdp.sharding.layout import Layout, layout_of
from compiled_fsdp.sharding.liveness import sign_in
from compiled_fsdp.sharding.mesh import (
    broadcast_states,
    check_mesh,
    check_reshard_after_forward,
    device_of,
    group_in_backward,
)
from compiled_fsdp.sharding.offload import offload_of
from compiled_fsdp.sharding.precision import check_policy, dtypes_of
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.unit import Unit

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
    from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

    WrapPolicy = ModuleWrapPolicy | CustomPolicy | Callable[..., bool]

M = TypeVar("M", bound=nn.Module)

# Original parameters and who sharded them: a second unit that holds one of them is tied across units; an optimizer that
# holds one was built too early.
_sharded = WeakTensorKeyDictionary()


@overload
def fully_shard(module: M, *, mesh: DeviceMesh | None = ..., reshard_after_forward: bool | int | None = ...,
                shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = ..., mp_policy: MixedPrecisionPolicy | None = ...,
                offload_policy: OffloadPolicy | None = ..., ignored_params: set[nn.Parameter] | None = ...,
                dp_mesh_dims: Any = ..., sync_module_states: bool = ..., auto_wrap_policy: WrapPolicy | None = ...) -> M: ...  # fmt: skip
@overload
def fully_shard(module: list[M], *, mesh: DeviceMesh | None = ..., reshard_after_forward: bool | int | None = ...,
                shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = ..., mp_policy: MixedPrecisionPolicy | None = ...,
                offload_policy: OffloadPolicy | None = ..., ignored_params: set[nn.Parameter] | None = ...,
                dp_mesh_dims: Any = ..., sync_module_states: bool = ..., auto_wrap_policy: None = ...) -> list[M]: ...  # fmt: skip


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    sync_module_states: bool = False,
    auto_wrap_policy: WrapPolicy | None = None,
) -> Any:
    """Shard the parameters of ``module`` over ``mesh``, in place, and return it.

    Every parameter becomes a DTensor of its old name, shape and dtype, split by rows; a forward of the module reads it in
    full. The module and those inside that are not sharded yet form one *unit*. Call it on the root alone, or on each layer
    and then the root, as with FSDP2. Build the optimizer afterwards.

    Args:
        module: a module, or a list of modules that form one unit.
        mesh: a 1-D device mesh, by default all ranks; or a 2-D one with names, which replicates over its first dimension and shards
            over the second (HSDP). It may be a slice of a larger one. Parameters that are DTensors on another slice of the same
            mesh (tensor parallelism) stay so in forward, and are sharded once more.
        reshard_after_forward: True gathers parameters again in backward; False keeps them from forward to backward; None
            is True, except for a root. An integer, a factor of the number of shards, keeps a shard of as many ranks from forward to
            backward, where only those ranks gather: of 64 ranks 8, say, on one node.
        shard_placement_fn: called with each parameter; returns the ``Shard`` that it gets, None for ``Shard(0)``, or with torch 2.13 a
            ``ShardPlacementResult``, for a mesh of its own. Dimensions but the first have to be divided evenly.
        mp_policy: dtypes of computation, reduction, inputs and outputs. Shards, gradients and so the optimizer's state keep the
            parameters' dtype. Without ``reduce_dtype`` gradients are reduced in it, as with FSDP2 of torch 2.15.
        offload_policy: ``CPUOffloadPolicy`` keeps shards, gradients and optimizer state in host memory.
        ignored_params: parameters to leave as they are, on every rank in full, their gradients not reduced.
        dp_mesh_dims: which dimensions of ``mesh`` are data parallel, where the parameters are DTensors on all of it (torch 2.13).
        sync_module_states: first broadcast parameters and buffers from the mesh's first rank, as FSDP1's option does. Without it
            ranks, and replicas, must have built equal modules.
        auto_wrap_policy: FSDP1's, with a single module: each module inside that the policy chooses becomes a unit, inner ones
            first, and then ``module``, all with the same arguments. ``torch.distributed.fsdp.wrap`` has ``ModuleWrapPolicy``;
            ``CustomPolicy``, whose dictionaries override these arguments for one unit; and callables ``(module, recurse,
            nonwrapped_numel) -> bool`` such as ``size_based_auto_wrap_policy``, whose further arguments come by
            ``functools.partial``. Modules that are sharded already are left alone.

    Raises:
        ValueError: a module or parameter that cannot be sharded, a mesh that does not fit, or what is no policy; named.
        RuntimeError: no process group, or a device that is not there.
        NotImplementedError: an option of FSDP2 that is not real yet; named.
    """
    arguments: dict[str, Any] = {
        "mesh": mesh, "reshard_after_forward": reshard_after_forward, "shard_placement_fn": shard_placement_fn, "mp_policy": mp_policy,
        "offload_policy": offload_policy, "ignored_params": ignored_params, "dp_mesh_dims": dp_mesh_dims, "sync_module_states": sync_module_states,
    }  # fmt: skip
    units = [(module, arguments)]
    if auto_wrap_policy is not None:
        units = units_by_policy(module, auto_wrap_policy, arguments)
    checked = _Checked(module, set(), {})
    steps = [_shard(unit, checked, **of_unit) for unit, of_unit in units]
    for step in steps:
        next(step)
    for step in steps:
        next(step, None)
    return module


# FSDP2's is asked for a module's state so; whichever of the two sharded it, both answer
cast("Any", fully_shard).state = fsdp2_state


class _Checked(NamedTuple):
    """Of the units of one call those that are checked and not yet sharded: their modules, and their parameters with names.

    given: the module that the call was given, or several; parameters are named as seen from there.
    """

    given: Any
    modules: set[nn.Module]
    parameters: dict[nn.Parameter, str]


def _shard(
    module: Any,
    checked: _Checked,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    sync_module_states: bool = False,
) -> Iterator[None]:
    """One unit in two steps: up to ``yield`` it is checked, behind it changed."""
    roots = _root_modules(module)
    _check_modules(roots)
    mesh, full_mesh = check_mesh(mesh, dp_mesh_dims), full_mesh_of(mesh, dp_mesh_dims)
    check_reshard_after_forward(reshard_after_forward, mesh)
    if mp_policy is not None:
        check_policy(mp_policy)
    offload = offload_of(offload_policy)
    device = device_of(mesh)
    managed = _managed_modules(roots, checked.modules)
    ignored = ignored_params or set()
    places = _places(managed, ignored)
    names = _names(checked.given, places)
    layouts = _layouts(places, names, shard_placement_fn, mesh, full_mesh, checked.parameters)
    dtypes = {param: dtypes_of(names[param], param, mp_policy) for param in places}
    checked.modules.update(roots)
    checked.parameters.update(names)

    # Nothing has been changed up to here.
    yield
    _move_to_device(places, managed, ignored, device)
    if sync_module_states:
        broadcast_states([*places, *(b for module in managed for b in module.buffers(recurse=False))], mesh)
    parameters = []
    for param, where in places.items():
        sharded = ShardedParameter(param, where, layouts[param], dtypes[param], device, offload)
        _sharded[param] = sharded
        parameters.append(sharded)
    again = group_in_backward(mesh, reshard_after_forward) if type(reshard_after_forward) is int else None
    # of integers 1 and the number of shards are False and True
    reshards = reshard_after_forward != 1 if type(reshard_after_forward) is int else reshard_after_forward
    unit = Unit(tuple(roots), parameters, mp_policy, cast("bool | None", reshards), again)
    for root in roots:
        unit.inside += units_of(root)
        for inner in unit.inside:
            inner.is_root = False
            inner.outer = weakref.ref(unit)
            inner.set_keep()
            inner.divide()
    _change_classes(roots, parameters, unit)
    answer_as_fsdp2(roots, unit)
    expect_fsdps_mark(managed)
    for root in roots:
        for any_unit in units_of(root):
            any_unit.name_from(root)
    for group in {parameter.group for parameter in parameters}:
        sign_in(group)  # from here on other ranks see it if this process ends
    unit.watch()
    watch_optimizers(_sharded)


# ---- checks, before anything changes ---------------------------------------------------------------------------------
def _root_modules(module: Any) -> list[nn.Module]:
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise ValueError("fully_shard: module is an empty list; give it the modules that form the unit.")
    for m in modules:
        if not isinstance(m, nn.Module):
            raise ValueError(f"fully_shard: module must be an nn.Module or a list of them, but got {type(m).__name__}.")
    # of modules inside each other only the outermost count
    inside = {id(child) for m in modules for child in m.modules() if child is not m}
    return [m for m in dict.fromkeys(modules) if id(m) not in inside]


def _check_modules(roots: list[nn.Module]) -> None:
    for root in roots:
        if isinstance(root, (nn.ModuleList, nn.ModuleDict)) and type(root).forward is nn.Module.forward:
            raise ValueError(f"fully_shard does not support containers that do not implement forward: {root}")
        if isinstance(root, FSDPModule):
            raise ValueError(
                f"fully_shard was already applied to this {type(root).__name__}; call it once on each module, inner modules first."
            )
        for name, module in root.named_modules():
            if isinstance(module, torch_fsdp_type()) and not isinstance(module, FSDPModule):
                raise ValueError(
                    f"fully_shard: module {name or 'itself'!r} was sharded by torch.distributed.fsdp.fully_shard; shard the whole model with "
                    "compiled_fsdp.fully_shard (change the import), or none of it."
                )
            if not isinstance(module, FSDPModule) and (api := composable_state_of(module)) is not None:
                raise ValueError(
                    f"fully_shard: torch's {api} was applied to module {name or 'itself'!r}; the two do not compose."
                )


def _managed_modules(roots: list[nn.Module], units: set[nn.Module]) -> list[nn.Module]:
    """The modules whose parameters a unit has, in FSDP2's order: children first, no unit inside, nor any of ``units``."""
    managed: dict[nn.Module, None] = {}
    visited: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        if module in visited or module in units or isinstance(module, FSDPModule):
            return
        visited.add(module)
        for child in module.children():
            visit(child)
        managed[module] = None

    for root in roots:
        visit(root)
    return list(managed)


def _places(managed: list[nn.Module], ignored: set[nn.Parameter]) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in managed:
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param not in ignored:
                places.setdefault(param, []).append((module, name))
    return places


def _names(given: Any, places: dict[nn.Parameter, list[tuple[nn.Module, str]]]) -> dict[nn.Parameter, str]:
    """For people: each parameter's path, quoted, and the class of the module that it starts at."""
    paths: dict[nn.Module, tuple[str, str]] = {}
    for root in _root_modules(given):
        for path, module in root.named_modules():
            paths.setdefault(module, (path, type(root).__name__))
    names = {}
    for param, where in places.items():
        module, attribute = where[0]
        path, start = paths[module]
        names[param] = f"'{path}{'.' if path else ''}{attribute}' of {start}"
    return names


def _layouts(
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]],
    names: dict[nn.Parameter, str],
    shard_placement_fn: Any,
    mesh: DeviceMesh,
    full_mesh: FullMesh | None,
    others: dict[nn.Parameter, str],
) -> dict[nn.Parameter, Layout]:
    layouts = {}
    for param in places:
        name = names[param]
        if param in _sharded or param in others:
            other = others[param] if param in others else repr(_sharded[param].name)
            raise ValueError(
                f"fully_shard: parameter {name} is shared with {other}, of another unit. For shared or tied parameters, "
                "use fully_shard([module_a, module_b]) to place them in the same unit."
            )
        if param.dim() == 0:
            raise ValueError(
                f"fully_shard doesn't support scalar parameters. Change {name} to a 1D tensor with numel equal to 1."
            )
        if param.numel() == 0:
            raise ValueError(
                f"fully_shard: parameter {name} has no elements (shape {tuple(param.shape)}); add it to ignored_params."
            )
        if not param.is_contiguous():
            raise NotImplementedError(
                f"fully_shard does not support non-contiguous parameters yet: {name} has shape {tuple(param.shape)} and strides {param.stride()}. "
                "Before, give it others: param.data = param.data.contiguous()."
            )
        if hasattr(param.data, "fsdp_pre_all_gather") or hasattr(param.data, "fsdp_post_all_gather"):
            raise NotImplementedError(
                f"fully_shard: parameter {name} is a {type(param.data).__name__} with FSDP2's all-gather extensions (fsdp_pre_all_gather), as float8 "
                "and NF4 tensors have them. They are not supported: a graph gathers plain tensors. With torchao's float8 training leave "
                "enable_fsdp_float8_all_gather off (Float8LinearConfig): weights are then gathered in their own dtype, and cast to float8 in "
                "forward. Frozen NF4 weights can be left whole on each rank: ignored_params."
            )
        if hasattr(param.data, "__tensor_flatten__") and not isinstance(param.data, DTensor):
            raise NotImplementedError(
                f"fully_shard: parameter {name} is a {type(param.data).__name__}, which is made of other tensors, as quantized weights are. Shards "
                "are rows of plain tensors. If it is frozen, leave it whole on each rank: ignored_params."
            )
        layouts[param] = layout_of(name, param, *_placement(name, param, shard_placement_fn, mesh, full_mesh))
    dtypes: dict[torch.dtype, str] = {}
    for param in places:
        if param.requires_grad:
            dtypes.setdefault(param.dtype, names[param])
    if len(dtypes) > 1:
        got = sorted(f"{dtype} ({name})" for dtype, name in dtypes.items())
        raise ValueError(
            f"fully_shard expects uniform original parameter dtype within a unit but got {', '.join(got)} among the trainable ones; "
            "call fully_shard on the modules of each dtype separately."
        )
    return layouts


def _placement(
    name: str, param: nn.Parameter, shard_placement_fn: Any, mesh: DeviceMesh, full_mesh: FullMesh | None
) -> tuple[DeviceMesh, int, FullMesh | None]:
    placement: Any = shard_placement_fn(param) if shard_placement_fn is not None else None
    if type(placement).__name__ == "ShardPlacementResult":  # torch 2.13 and later
        mesh, full_mesh = _meshes_of(name, placement.mesh_info)
        placement = placement.placement
    if placement is None:
        return mesh, 0, full_mesh
    if not isinstance(placement, Shard):
        raise ValueError(
            f"fully_shard: shard_placement_fn should return a Shard or None, but for {name} it returned {placement!r}."
        )
    if not -param.dim() <= placement.dim < param.dim():
        raise ValueError(
            f"fully_shard: shard_placement_fn: {placement} is invalid for {name} of shape {tuple(param.shape)}."
        )
    return mesh, placement.dim % param.dim(), full_mesh


def _meshes_of(name: str, info: Any) -> tuple[DeviceMesh, FullMesh | None]:
    if info is None or getattr(info, "shard_mesh_dim", None) != info.mesh.ndim - 1:
        raise ValueError(
            f"fully_shard: shard_placement_fn: the mesh_info that it returned for {name} has to be a FSDPMeshInfo that shards over its mesh's last "
            f"dimension, but got {info!r}."
        )
    if info.dp_mesh_dims is not None:
        return check_mesh(info.spmd_mesh, info.dp_mesh_dims), full_mesh_of(info.spmd_mesh, info.dp_mesh_dims)
    return check_mesh(info.mesh, None), None


# ---- the change ------------------------------------------------------------------------------------------------------
def _move_to_device(places: Any, managed: list[nn.Module], ignored: set[nn.Parameter], device: torch.device) -> None:
    buffers = (buffer for module in managed for buffer in module.buffers(recurse=False))
    for tensor in itertools.chain(places, buffers):
        if tensor.device not in (device, torch.device("meta")):
            tensor.data = tensor.to(device)


def _change_classes(roots: list[nn.Module], parameters: list[ShardedParameter], unit: Unit) -> None:
    reads: dict[nn.Module, dict[str, ShardedParameter]] = {root: {} for root in roots}
    for parameter in parameters:
        for module, name in parameter.live_places():
            reads.setdefault(module, {})[name] = parameter
    for module, of_module in reads.items():
        shard_class(module, of_module, unit if module in roots else None)
        module.register_state_dict_pre_hook(reshard)
        module.register_load_state_dict_pre_hook(_refuse_plain_tensors)
        module.register_load_state_dict_post_hook(_refresh_loaded)


def _refuse_plain_tensors(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    # DCP's helper has looked at the full parameters by now, and made plain tensors like them
    full = any(parameter.unit.pending is not None for parameter in module._fsdp_reads.values())
    reshard(module)
    for name in module._fsdp_reads:
        value = state_dict.get(prefix + name)
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            instead = "; call reshard() before, since the model was unshard()ed." if full else "."
            raise ValueError(
                f"load_state_dict: {prefix + name!r} is a plain tensor, but the parameter is sharded: a DTensor is expected. Load a full state "
                "dict with torch.distributed.checkpoint.state_dict.set_model_state_dict(model, state_dict, "
                f"options=StateDictOptions(full_state_dict=True)){instead}"
            )


def _refresh_loaded(module: Any, incompatible_keys: Any) -> None:
    for parameter in module._fsdp_reads.values():
        parameter.refresh()
