"""The sharding call: FSDP2's signature, and named errors before anything is changed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.weak import WeakTensorKeyDictionary

from compiled_fsdp import group as groups
from compiled_fsdp.compat import composable_state_of, torch_fsdp_type
from compiled_fsdp.module import FSDPModule, reshard, shard_class, units_of
from compiled_fsdp.optimizers import watch_optimizers
from compiled_fsdp.parameter import ShardedParameter
from compiled_fsdp.unit import Unit

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

M = TypeVar("M", bound=nn.Module)

# Original parameters and who sharded them: a second unit that holds one of them is tied across units; an optimizer that
# holds one was built too early.
_sharded = WeakTensorKeyDictionary()


@overload
def fully_shard(module: M, *, mesh: DeviceMesh | None = ..., reshard_after_forward: bool | int | None = ...,
                shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = ..., mp_policy: MixedPrecisionPolicy | None = ...,
                offload_policy: OffloadPolicy | None = ..., ignored_params: set[nn.Parameter] | None = ...,
                dp_mesh_dims: Any = ...) -> M: ...  # fmt: skip
@overload
def fully_shard(module: list[M], *, mesh: DeviceMesh | None = ..., reshard_after_forward: bool | int | None = ...,
                shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = ..., mp_policy: MixedPrecisionPolicy | None = ...,
                offload_policy: OffloadPolicy | None = ..., ignored_params: set[nn.Parameter] | None = ...,
                dp_mesh_dims: Any = ...) -> list[M]: ...  # fmt: skip


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
) -> Any:
    """Shard the parameters of ``module`` over ``mesh``, in place, and return it.

    Every parameter becomes a DTensor of its old name, shape and dtype, split by rows; a forward of the module reads it in
    full. The module and those inside that are not sharded yet form one *unit*. Call it on the root alone, or on each layer
    and then the root, as with FSDP2. Build the optimizer afterwards.

    Args:
        module: a module, or a list of modules that form one unit.
        mesh: a 1-D device mesh; by default all ranks. It may be a slice of a larger one.
        reshard_after_forward: True gathers parameters again in backward; False keeps them from forward to backward; None
            is True, except for a root. Of integers the world size (True) and 1 (False) are supported.
        shard_placement_fn: called with each parameter; None or ``Shard(0)`` are supported.
        mp_policy, offload_policy: the defaults are supported.
        ignored_params: parameters to leave as they are, on every rank in full, their gradients not reduced.
        dp_mesh_dims: not supported yet.

    Raises:
        ValueError: a module or parameter that cannot be sharded, or a mesh that does not fit; named.
        RuntimeError: no process group, or a device that is not there.
        NotImplementedError: an option of FSDP2 that is not real yet; named.
    """
    roots = _root_modules(module)
    _check_modules(roots)
    mesh = _check_mesh(mesh, dp_mesh_dims)
    _check_options(reshard_after_forward, mp_policy, offload_policy, mesh)
    device = _device_of(mesh)
    managed = _managed_modules(roots)
    places = _places(managed, ignored_params or set())
    _check_parameters(places, shard_placement_fn)

    # Nothing has been changed up to here.
    group = groups.shard_group(mesh)
    _move_to_device(places, managed, ignored_params or set(), device)
    parameters = []
    for param, where in places.items():
        sharded = ShardedParameter(param, where, mesh, group)
        _sharded[param] = sharded
        parameters.append(sharded)
    # an int is the world size to reshard to: all of it, or none
    to_shards = reshard_after_forward != 1 if type(reshard_after_forward) is int else reshard_after_forward
    unit = Unit(tuple(roots), parameters, group, cast("bool | None", to_shards))
    for root in roots:
        unit.inside += units_of(root)
        for inner in unit.inside:
            inner.is_root = False
            inner.set_keep()
            inner.divide()
    _change_classes(roots, parameters, unit)
    for root in roots:
        for any_unit in units_of(root):
            any_unit.name_from(root)
    unit.watch()
    watch_optimizers(_sharded)
    return module


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
            if (api := composable_state_of(module)) is not None:
                raise ValueError(
                    f"fully_shard: torch's {api} was applied to module {name or 'itself'!r}; the two do not compose."
                )


def _check_mesh(mesh: DeviceMesh | None, dp_mesh_dims: Any) -> DeviceMesh:
    if not dist.is_initialized():
        raise RuntimeError(
            "fully_shard: there is no process group. Call torch.distributed.init_process_group() first (torchrun sets what it needs)."
        )
    if dp_mesh_dims is not None:
        raise NotImplementedError(
            "fully_shard: dp_mesh_dims is not supported yet; pass the 1-D data-parallel mesh as mesh."
        )
    if mesh is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return init_device_mesh(accelerator.type if accelerator is not None else "cpu", (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"fully_shard: mesh must be a torch.distributed.DeviceMesh, but got {type(mesh).__name__}.")
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2:
        if mesh.mesh_dim_names is None:
            raise ValueError(
                "fully_shard: a 2-D mesh for HSDP needs mesh_dim_names, the first for replication, the second for sharding."
            )
        raise NotImplementedError(
            f"fully_shard: mesh with 2 dimensions (HSDP) is not supported yet; pass a 1-D mesh, such as mesh[{mesh.mesh_dim_names[1]!r}]."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"fully_shard: mesh {mesh} does not contain rank {dist.get_rank()}; call fully_shard on the mesh's own ranks only."
        )
    return mesh


def _check_options(reshard_after_forward: Any, mp_policy: Any, offload_policy: Any, mesh: DeviceMesh) -> None:
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, (bool, int)):
        raise ValueError(
            f"fully_shard: reshard_after_forward should be a bool, an int or None, but got {type(reshard_after_forward).__name__}."
        )
    if isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool):
        size = mesh.size()
        if not 1 <= reshard_after_forward <= size or size % reshard_after_forward:
            raise ValueError(
                f"fully_shard: reshard_after_forward as an int should be a factor of {size}, not {reshard_after_forward}"
            )
        if reshard_after_forward not in (1, size):
            raise NotImplementedError(
                f"fully_shard: reshard_after_forward={reshard_after_forward} (an int) is not supported yet; use True, False or None."
            )
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        if (value := getattr(mp_policy, name, None)) is not None:
            raise NotImplementedError(
                f"fully_shard: mp_policy with {name}={value} is not supported yet; leave it None, or use torch.autocast."
            )
    if offload_policy is not None and type(offload_policy).__name__ != "OffloadPolicy":
        raise NotImplementedError(
            f"fully_shard: offload_policy={type(offload_policy).__name__} is not supported yet; use OffloadPolicy(), the default."
        )


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != mesh.device_type:
        raise RuntimeError(
            f"fully_shard: the mesh is on {mesh.device_type!r}, but this process has {accelerator.type if accelerator else 'no accelerator'}; "
            'make the mesh with init_device_mesh("cpu", ...) to train on CPU.'
        )
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _managed_modules(roots: list[nn.Module]) -> list[nn.Module]:
    """The modules whose parameters this call shards, in FSDP2's order: children first, no unit inside."""
    managed: dict[nn.Module, None] = {}
    visited: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        if module in visited or isinstance(module, FSDPModule):
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


def _check_parameters(places: dict[nn.Parameter, list[tuple[nn.Module, str]]], shard_placement_fn: Any) -> None:
    for param, where in places.items():
        module, attribute = where[0]
        name = f"{type(module).__name__}.{attribute}"
        if param in _sharded:
            raise ValueError(
                f"fully_shard: parameter {name} is shared with {_sharded[param].name!r} of another unit. For shared or tied parameters, "
                "use fully_shard([module_a, module_b]) to place them in the same unit."
            )
        if isinstance(param, DTensor):
            raise NotImplementedError(
                f"fully_shard: parameter {name} is a DTensor already (tensor parallelism, or sharded before); this is not supported yet. "
                "Shard plain parameters."
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
                f"fully_shard does not support non-contiguous parameters yet: {name} has shape {tuple(param.shape)} and strides {param.stride()}"
            )
        _check_placement(name, param, shard_placement_fn)
    dtypes = {param.dtype for param in places if param.requires_grad}
    if len(dtypes) > 1:
        raise ValueError(
            f"fully_shard expects uniform original parameter dtype within a unit but got {sorted(map(str, dtypes))} among the trainable ones; "
            "call fully_shard on the modules of each dtype separately."
        )


def _check_placement(name: str, param: nn.Parameter, shard_placement_fn: Any) -> None:
    placement = shard_placement_fn(param) if shard_placement_fn is not None else None
    if placement is None:
        return
    if type(placement).__name__ == "ShardPlacementResult":  # torch 2.13 and later
        raise NotImplementedError(
            f"fully_shard: shard_placement_fn: a ShardPlacementResult (a mesh of its own, for {name}) is not supported yet; return Shard(0) or "
            "None, and call fully_shard on the modules of each mesh separately."
        )
    if not isinstance(placement, Shard):
        raise ValueError(
            f"fully_shard: shard_placement_fn should return a Shard or None, but for {name} it returned {placement!r}."
        )
    if not -param.dim() <= placement.dim < param.dim():
        raise ValueError(
            f"fully_shard: shard_placement_fn: {placement} is invalid for {name} of shape {tuple(param.shape)}."
        )
    if placement.dim % param.dim() != 0:
        raise NotImplementedError(
            f"fully_shard: shard_placement_fn: {placement} for {name} is not supported yet; return Shard(0) or None."
        )


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
    reshard(module)
    for name in module._fsdp_reads:
        value = state_dict.get(prefix + name)
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            raise ValueError(
                f"load_state_dict: {prefix + name!r} is a plain tensor, but the parameter is sharded: a DTensor is expected. Load a full state "
                "dict with torch.distributed.checkpoint.state_dict.set_model_state_dict(model, state_dict, "
                "options=StateDictOptions(full_state_dict=True))."
            )


def _refresh_loaded(module: Any, incompatible_keys: Any) -> None:
    for parameter in module._fsdp_reads.values():
        parameter.refresh()
