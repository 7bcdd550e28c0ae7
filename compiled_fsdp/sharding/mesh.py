"""Check the mesh of ``fully_shard``, find its device and its group for backward, and broadcast states over it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from compiled_fsdp.buckets.transport import on_wire, wire_dtype
from compiled_fsdp.compat.autograd import local_of
from compiled_fsdp.sharding.full_mesh import data_parallel_slice
from compiled_fsdp.sharding.process_groups import ShardGroup, subgroup_of


def check_mesh(mesh: DeviceMesh | None, dp_mesh_dims: Any, *, replicates: bool = False) -> DeviceMesh:
    """Return the data-parallel mesh: 1-D (shards, or replicas if ``only_replicates``) or 2-D (replicas, shards).

    With ``dp_mesh_dims`` these are the named dimensions of a full mesh. If both arguments are None, it is a mesh of all
    ranks; with ``replicates`` its dimension is named "replicate", as torch names it.

    Raises:
        RuntimeError: there is no process group.
        ValueError: the mesh does not fit. For example, it is 3-D, or does not contain this rank.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "fully_shard: there is no process group. Call torch.distributed.init_process_group() first (torchrun sets "
            "what it needs)."
        )
    if mesh is None and dp_mesh_dims is None:
        return mesh_of_all_ranks("replicate" if replicates else None)
    if replicates:
        _check_replicates(mesh, dp_mesh_dims)
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"fully_shard: mesh must be a torch.distributed.DeviceMesh, but got {type(mesh).__name__}.")
    if dp_mesh_dims is not None:
        mesh = data_parallel_slice(mesh, dp_mesh_dims)
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ValueError(
            "fully_shard: a 2-D mesh for HSDP needs mesh_dim_names, the first for replication, the second for sharding."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"fully_shard: mesh {mesh} does not contain rank {dist.get_rank()}; call fully_shard on the mesh's own "
            "ranks only."
        )
    return mesh


def _check_replicates(mesh: DeviceMesh | None, dp_mesh_dims: Any) -> None:
    """Raise ValueError if the arguments of ``replicate`` have a dimension to shard over."""
    if dp_mesh_dims is None and isinstance(mesh, DeviceMesh) and mesh.ndim != 1:
        raise ValueError(
            f"replicate expects a 1D DeviceMesh but got {mesh}. To shard over its second dimension, use fully_shard."
        )
    if dp_mesh_dims is not None and hasattr(dp_mesh_dims, "shard_names") and not only_replicates(dp_mesh_dims):
        raise ValueError(
            f"replicate: dp_mesh_dims names dimensions to shard over, {dp_mesh_dims.shard_names}. Use fully_shard, or "
            "name only dimensions to replicate over."
        )


def only_replicates(dp_mesh_dims: Any) -> bool:
    """Whether ``dp_mesh_dims`` names dimensions to replicate over, but none to shard over."""
    return dp_mesh_dims is not None and not dp_mesh_dims.shard_names


def mesh_of_all_ranks(name: str | None = None) -> DeviceMesh:
    """Make the default mesh, 1-D over all ranks, with ``name`` for its dimension; needs a process group."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = accelerator.type if accelerator is not None else "cpu"
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=None if name is None else (name,))


def shards_of(mesh: DeviceMesh) -> int:
    """The number of ranks in a checked mesh that share a parameter."""
    return mesh.size(mesh.ndim - 1)


def check_reshard_after_forward(value: Any, mesh: DeviceMesh, *, replicates: bool = False) -> None:
    """Raise ValueError unless ``reshard_after_forward`` is a bool, None, or a factor of the number of shards."""
    if value is not None and not isinstance(value, (bool, int)):
        raise ValueError(
            f"fully_shard: reshard_after_forward should be a bool, an int or None, but got {type(value).__name__}."
        )
    if type(value) is int:
        size = 1 if replicates else shards_of(mesh)
        if not 1 <= value <= size or size % value:
            raise ValueError(f"fully_shard: reshard_after_forward as an int should be a factor of {size}, not {value}")


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device that this rank computes on.

    Raises:
        RuntimeError: this process has no device of the mesh's type.
    """
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != mesh.device_type:
        raise RuntimeError(
            f"fully_shard: the mesh is on {mesh.device_type!r}, but this process has "
            f"{accelerator.type if accelerator else 'no accelerator'}; "
            'make the mesh with init_device_mesh("cpu", ...) to train on CPU.'
        )
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def post_forward_group(mesh: DeviceMesh, ranks: int) -> ShardGroup | None:
    """The group of ``ranks`` neighbours, with this rank, that gathers in backward; None if that is all ranks or one.

    For example, with 8 shards and ``ranks=4`` it is the group of ranks 0 to 3 or of ranks 4 to 7.
    """
    return None if ranks in (1, shards_of(mesh)) else subgroup_of(mesh.get_group(mesh.ndim - 1), ranks)


def broadcast_states(tensors: Iterable[torch.Tensor], mesh: DeviceMesh) -> None:
    """Overwrite the tensors on all ranks of the mesh with the first rank's values, in place."""
    for tensor in tensors:
        local = local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()
        if local.is_meta:
            continue
        as_it_is = wire_dtype(local.dtype) == local.dtype
        copy = local if as_it_is else local.contiguous()
        sent = copy if as_it_is else on_wire(copy.view(-1))
        for dim in range(mesh.ndim - 1, -1, -1):
            group = mesh.get_group(dim)
            dist.broadcast(sent, dist.get_process_group_ranks(group)[0], group=group)
        if copy is not local:
            local.copy_(copy)
