"""``dp_mesh_dims``: parameters that are DTensors on the full mesh already, of which some dimensions are data parallel.

As FSDP2 of torch 2.13 has it: there they are ``Replicate()``, and become shards in place, on the same mesh.
"""

from __future__ import annotations

import math
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from compiled_fsdp.compat.autograd import concatenate_meshes, flattened_mesh, strided_shard


class FullMesh:
    """A mesh of all kinds of parallelism, and the indices of its data-parallel dimensions."""

    def __init__(self, mesh: DeviceMesh, dims: Any) -> None:
        self.mesh = mesh
        self.names: tuple[str, ...] = mesh.mesh_dim_names or ()
        self.shards = tuple(map(self.names.index, dims.shard_names))
        self.replicas = tuple(map(self.names.index, dims.replicate_names))

    def check(self, name: str, param: Any) -> None:
        """Raise ValueError if ``param`` does not lie on the mesh as a parameter must.

        It must be a DTensor on the mesh, replicated along the data-parallel dimensions.
        """
        if not isinstance(param, DTensor):
            raise ValueError(
                f"fully_shard: with dp_mesh_dims all parameters must be DTensors on the full mesh, but {name} is a "
                "plain tensor. Distribute it, for example with torch.distributed.tensor.distribute_module(model, "
                "mesh), or leave dp_mesh_dims out and pass mesh['dp']."
            )
        if param.device_mesh != self.mesh:
            raise ValueError(
                f"fully_shard: with dp_mesh_dims all parameters must be DTensors on mesh={self.mesh}, but {name} is "
                f"one on {param.device_mesh}."
            )
        for i in (*self.shards, *self.replicas):
            if not isinstance(param.placements[i], Replicate):
                raise ValueError(
                    f"fully_shard: {name} has {param.placements[i]} on the data-parallel mesh dimension "
                    f"{self.names[i]!r}; dp_mesh_dims expects Replicate() there, since fully_shard shards it."
                )

    def sharded(
        self, placements: tuple[Placement, ...], dim: int, dp_mesh: DeviceMesh
    ) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Where a parameter lies once its dimension ``dim`` is sharded.

        Several mesh dimensions that shard are flattened into one.
        """
        found: list[tuple[DeviceMesh | None, Placement]] = []
        for i, placement in enumerate(placements):
            if i == self.shards[0]:
                # shards of the same dimension on mesh dimensions further right lie inside of this one's
                split = math.prod(self.mesh.size(j) for j, p in enumerate(placements) if j > i and _cuts(p, dim))
                found.append((dp_mesh, strided_shard(dim, split) if split > 1 else Shard(dim)))
            elif i not in self.shards:
                found.append((None if i in self.replicas else self.mesh[self.names[i]], placement))
        if len(self.shards) == 1:
            return self.mesh, tuple(placement for _, placement in found)
        # as FSDP2 orders them: the replicas' dimension stands right before the shards'
        found = [(mesh, placement) for mesh, placement in found if mesh is not None]
        spread: list[Placement] = []
        for mesh, placement in found:
            spread += [Replicate(), placement] if mesh is dp_mesh and dp_mesh.ndim == 2 else [placement]
        return concatenate_meshes([mesh for mesh, _ in found if mesh is not None]), tuple(spread)


def full_mesh_of(mesh: DeviceMesh | None, dims: Any) -> FullMesh | None:
    """The checked mesh with its dimensions, if there are ``dims``."""
    return None if mesh is None or dims is None else FullMesh(mesh, dims)


def _cuts(placement: Placement, dim: int) -> bool:
    # strided shards too, which are no Shard
    return getattr(placement, "dim", None) == dim


def data_parallel_slice(mesh: DeviceMesh, dims: Any) -> DeviceMesh:
    """The data-parallel dimensions of a full mesh: 1-D (shards) or 2-D (replicas, shards).

    Raises:
        ValueError: names that the mesh does not have.
        NotImplementedError: dimensions to replicate over, and none to shard.
    """
    if not hasattr(dims, "shard_names"):
        raise ValueError(
            "fully_shard: dp_mesh_dims must be a torch.distributed.fsdp.DataParallelMeshDims, but got "
            f"{type(dims).__name__}."
        )
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError("fully_shard: mesh must have mesh_dim_names when dp_mesh_dims is provided")
    shards, replicas = tuple(dims.shard_names), tuple(dims.replicate_names)
    for name in (*shards, *replicas):
        if name not in names:
            raise ValueError(f"fully_shard: dp_mesh_dims: the mesh has no dimension {name!r}, but {names}.")
    if not shards:
        raise NotImplementedError(
            f"fully_shard: dp_mesh_dims: replicating over {replicas} alone is not supported; name dimensions to shard "
            "over, or use torch's DistributedDataParallel."
        )
    first = names.index(shards[0])
    if names[first : first + len(shards)] != shards:
        raise ValueError(
            f"fully_shard: dp_mesh_dims: shard={shards} must be neighbours in the mesh's order, which is {names}."
        )
    over = flattened_mesh(mesh, shards)
    return over if not replicas else concatenate_meshes([flattened_mesh(mesh, replicas), over])
