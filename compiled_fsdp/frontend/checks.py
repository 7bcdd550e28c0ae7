"""Checks and decisions of ``fully_shard`` before anything is changed: modules, parameters and their layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from compiled_fsdp.compat.autograd import local_of
from compiled_fsdp.compat.modules import composable_state_of, has_spmd_types, torch_fsdp_type
from compiled_fsdp.frontend.fsdp_module import FSDPModule
from compiled_fsdp.frontend.optimizer_hooks import sharded_from
from compiled_fsdp.sharding.extension import check_hooks, has_hooks, is_wrapped
from compiled_fsdp.sharding.full_mesh import FullMesh, full_mesh_of
from compiled_fsdp.sharding.layout import Layout, layout_of
from compiled_fsdp.sharding.mesh import check_mesh
from compiled_fsdp.sharding.wire_policy import WirePolicy
from compiled_fsdp.state.registry import parameters_by_param, unit_of


def root_modules(module: Any) -> list[nn.Module]:
    """The module that ``fully_shard`` was given, or the modules of a list that are inside of no other one in the list.

    Raises:
        ValueError: the list is empty, or something is not a module.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise ValueError("fully_shard: module is an empty list; give it the modules that form the unit.")
    for m in modules:
        if not isinstance(m, nn.Module):
            raise ValueError(f"fully_shard: module must be an nn.Module or a list of them, but got {type(m).__name__}.")
    # a module inside of another module of the list belongs to that one
    inside = {id(child) for m in modules for child in m.modules() if child is not m}
    return [m for m in dict.fromkeys(modules) if id(m) not in inside]


def check_modules(roots: list[nn.Module]) -> None:
    """Refuse modules that cannot form a unit.

    Raises:
        ValueError: a container without a forward; a module that compiled_fsdp or torch's FSDP2 has sharded already; a
            module to which another of torch's composable APIs was applied.
        RuntimeError: ``set_manual_backward_finalization(True)`` was called on a module inside, but it is for the root.
    """
    for root in roots:
        if isinstance(root, (nn.ModuleList, nn.ModuleDict)) and type(root).forward is nn.Module.forward:
            raise ValueError(f"fully_shard does not support containers that do not implement forward: {root}")
        if isinstance(root, FSDPModule):
            raise ValueError(
                f"fully_shard was already applied to this {type(root).__name__}; call it once on each module, inner "
                "modules first."
            )
        for name, module in root.named_modules():
            if isinstance(module, torch_fsdp_type()) and not isinstance(module, FSDPModule):
                raise ValueError(
                    f"fully_shard: module {name or 'itself'!r} was sharded by torch.distributed.fsdp.fully_shard; "
                    "shard the whole model with compiled_fsdp.fully_shard (change the import), or none of it."
                )
            if isinstance(module, FSDPModule) and module._fsdp_unit.policy.defer_to_finalize:
                raise RuntimeError(
                    "fully_shard: set_manual_backward_finalization must be called on the root FSDP module, but it was "
                    f"called on module {name!r}. Call it on {type(root).__name__} once that is sharded."
                )
            if not isinstance(module, FSDPModule) and (api := composable_state_of(module)) is not None:
                raise ValueError(
                    f"fully_shard: torch's {api} was applied to module {name or 'itself'!r}; the two do not compose."
                )


def managed_modules(roots: list[nn.Module], units: set[nn.Module]) -> list[nn.Module]:
    """The modules whose own parameters belong to a unit, in FSDP2's order: children first.

    Args:
        roots: the unit's outermost modules.
        units: modules of other units of the same call. They are left out, like modules that are sharded already.
    """
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


def places_of(managed: list[nn.Module], ignored: set[nn.Parameter]) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """The parameters of a unit, in registration order, each with all modules and attribute names that hold it."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in managed:
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param not in ignored:
                places.setdefault(param, []).append((module, name))
    return places


def names_of(given: Any, places: dict[nn.Parameter, list[tuple[nn.Module, str]]]) -> dict[nn.Parameter, str]:
    """Names of parameters for messages: the quoted path, and the class of the module where it starts.

    For example "'layers.0.weight' of Transformer".
    """
    paths: dict[nn.Module, tuple[str, str]] = {}
    for root in root_modules(given):
        for path, module in root.named_modules():
            paths.setdefault(module, (path, type(root).__name__))
    names = {}
    for param, where in places.items():
        module, attribute = where[0]
        path, start = paths[module]
        names[param] = f"'{path}{'.' if path else ''}{attribute}' of {start}"
    return names


def layouts_of(
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]],
    names: dict[nn.Parameter, str],
    shard_placement_fn: Any,
    mesh: DeviceMesh,
    full_mesh: FullMesh | None,
    replicates: bool,
    others: dict[nn.Parameter, str],
) -> dict[nn.Parameter, Layout]:
    """The layout of each parameter on the meshes.

    Args:
        replicates: whether every rank of ``mesh`` holds whole parameters.
        others: parameters of other units of the same call, with their names.

    Raises:
        ValueError: ``shard_placement_fn`` is given although nothing is sharded; a parameter belongs to another unit
            (for example, a layer is sharded after its root), has no dimension or no elements, or its placement does not
            fit; or trainable parameters have several dtypes.
        NotImplementedError: a parameter is not contiguous, or ``spmd_types`` has annotated it.
    """
    if replicates and shard_placement_fn is not None:
        raise ValueError(
            "fully_shard: shard_placement_fn chooses the dimension that is sharded, but dp_mesh_dims names only "
            "dimensions to replicate over. Leave shard_placement_fn out, or name a dimension to shard over."
        )
    layouts = {}
    known = parameters_by_param() if any(isinstance(param, DTensor) for param in places) else {}
    for param in places:
        name, holder = names[param], places[param][0][0]
        sharded = known.get(param) or sharded_from.get(param)
        units = [] if sharded is None else unit_of(sharded).modules
        if any(holder in module.modules() for module in units):
            outer = " and ".join(type(module).__name__.removeprefix("FSDP") for module in units)
            raise ValueError(
                f"fully_shard: {type(holder).__name__} is already part of the unit of {outer}, which has its parameter "
                f"{name}: shard layers before the root. For example: for block in model.blocks: fully_shard(block); "
                "then fully_shard(model)."
            )
        if sharded is not None or param in others:
            other = others[param] if sharded is None else repr(sharded.name)
            raise ValueError(
                f"fully_shard: parameter {name} is shared with {other}, of another unit. For shared or tied "
                "parameters, use fully_shard([module_a, module_b]) to place them in the same unit."
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
                f"fully_shard does not support non-contiguous parameters yet: {name} has shape {tuple(param.shape)} "
                f"and strides {param.stride()}. Make it contiguous first: param.data = param.data.contiguous()."
            )
        if has_spmd_types(param):
            raise NotImplementedError(
                f"fully_shard: parameter {name} has annotations of spmd_types, which compiled_fsdp does not keep in "
                "forward (FSDP2 does). Shard the model before it is annotated, or with "
                "torch.distributed.fsdp.fully_shard."
            )
        place = _placement(name, param, shard_placement_fn, mesh, full_mesh)
        layouts[param] = layout_of(name, param, *place, replicates=replicates)
    dtypes: dict[torch.dtype, str] = {}
    for param in places:
        if param.requires_grad:
            dtypes.setdefault(param.dtype, names[param])
    if len(dtypes) > 1:
        got = sorted(f"{dtype} ({name})" for dtype, name in dtypes.items())
        raise ValueError(
            f"fully_shard expects uniform original parameter dtype within a unit but got {', '.join(got)} among the "
            "trainable ones; call fully_shard on the modules of each dtype separately."
        )
    return layouts


def check_wrapped(
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]],
    names: dict[nn.Parameter, str],
    layouts: dict[nn.Parameter, Layout],
    reshard_after_forward: Any,
    wire_policy: WirePolicy,
) -> None:
    """Refuse parameters with all-gather extensions, or made of other tensors, if they cannot be sharded or gathered.

    Raises:
        ValueError: only one of the two hooks is defined, its signature is unknown, or the unit has a codec for gathers.
        NotImplementedError: the parameter is tensor-parallel, a smaller group would gather it in backward, or it cannot
            be cut into shards.
    """
    for param in places:
        local = local_of(param.data) if isinstance(param.data, DTensor) else param.data
        if not is_wrapped(local):
            continue
        name, kind = names[param], type(local).__name__
        if has_hooks(local):
            check_hooks(name, local)
        if wire_policy.gather is not None:
            raise ValueError(
                f"fully_shard: parameter {name} is a {kind}, which chooses itself which tensors are gathered, so "
                f"WirePolicy(gather={wire_policy.gather!r}) cannot encode it. Give its unit a policy without gather."
            )
        if isinstance(param.data, DTensor):
            raise NotImplementedError(
                f"fully_shard: parameter {name} is a DTensor of {kind}: all-gather extensions do not compose with "
                "tensor parallelism. Leave the extensions off (enable_fsdp_float8_all_gather=False), or shard without "
                "tensor parallelism."
            )
        if type(reshard_after_forward) is int and 1 < reshard_after_forward < layouts[param].group.size:
            raise NotImplementedError(
                f"fully_shard: parameter {name} is a {kind}, which does not work with "
                f"reshard_after_forward={reshard_after_forward}, because a part of its gathered tensors would have to "
                "be kept. Use True or False for its unit."
            )
        try:
            with torch.no_grad():
                layouts[param].shard_of(local)
        except Exception as error:  # the tensor's own code may raise anything
            raise NotImplementedError(
                f"fully_shard: parameter {name} is a {kind}, a tensor that is made of other tensors (for example a "
                f"quantized weight), and it cannot be split into rows: {type(error).__name__}: {error}. If it is "
                "frozen, keep it whole on each rank: ignored_params."
            ) from error


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
            f"fully_shard: shard_placement_fn: the mesh_info that it returned for {name} has to be a FSDPMeshInfo that "
            f"shards over its mesh's last dimension, but got {info!r}."
        )
    if info.dp_mesh_dims is not None:
        return check_mesh(info.spmd_mesh, info.dp_mesh_dims), full_mesh_of(info.spmd_mesh, info.dp_mesh_dims)
    return check_mesh(info.mesh, None), None
