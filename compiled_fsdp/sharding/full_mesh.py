"""Support ``dp_mesh_dims``: parameters are DTensors on a full mesh already, and some mesh dimensions are data parallel.

As in FSDP2 of torch 2.13, parameters must be ``Replicate()`` along the data-parallel dimensions. ``fully_shard`` makes
them shards there, on the same mesh. For example, ``(Replicate(), Shard(1))`` on the mesh ("dp", "tp") becomes
``(Shard(0), Shard(1))``. If no dimension shards, placements stay as they are.
"""

from __future__ import annotations

import math
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from compiled_fsdp.compat.autograd import concatenate_meshes, flattened_mesh, strided_shard


class FullMesh:
    """A mesh with the dimensions of all kinds of parallelism, and the indices of the data-parallel ones."""

    def __init__(self, mesh: DeviceMesh, dims: Any) -> None:
        self.mesh = mesh
        self.names: tuple[str, ...] = mesh.mesh_dim_names or ()
        self.shards = tuple(map(self.names.index, dims.shard_names))
        self.replicas = tuple(map(self.names.index, dims.replicate_names))

    def check(self, name: str, param: Any) -> None:
        """Raise ValueError unless ``param`` is a DTensor on the mesh, replicated along its data-parallel dimensions."""
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
        """Return the mesh and placements of a parameter after its dimension ``dim`` is sharded.

        If several mesh dimensions shard, they are flattened into one.
        """
        if not self.shards:
            return self.mesh, placements
        found: list[tuple[DeviceMesh | None, Placement]] = []
        for i, placement in enumerate(placements):
            if i == self.shards[0]:
                # mesh dimensions further right have cut ``dim`` already, and each of their parts is cut again here
                split = math.prod(self.mesh.size(j) for j, p in enumerate(placements) if j > i and _cuts(p, dim))
                found.append((dp_mesh, strided_shard(dim, split) if split > 1 else Shard(dim)))
            elif i not in self.shards:
                found.append((None if i in self.replicas else self.mesh[self.names[i]], placement))
        if len(self.shards) == 1:
            return self.mesh, tuple(placement for _, placement in found)
        # FSDP2's order: the replicas' dimension comes right before the shards' dimension
        found = [(mesh, placement) for mesh, placement in found if mesh is not None]
        spread: list[Placement] = []
        for mesh, placement in found:
            spread += [Replicate(), placement] if mesh is dp_mesh and dp_mesh.ndim == 2 else [placement]
        return concatenate_meshes([mesh for mesh, _ in found if mesh is not None]), tuple(spread)


def full_mesh_of(mesh: DeviceMesh | None, dims: Any) -> FullMesh | None:
    """Return the checked mesh with its data-parallel dimensions; None without ``dims``."""
    return None if mesh is None or dims is None else FullMesh(mesh, dims)


def _cuts(placement: Placement, dim: int) -> bool:
    # not ``isinstance``, because a strided shard is not a ``Shard``
    return getattr(placement, "dim", None) == dim


def data_parallel_slice(mesh: DeviceMesh, dims: Any) -> DeviceMesh:
    """Return the data-parallel dimensions of a full mesh: a 1-D mesh (shards or replicas), or 2-D (replicas, shards).

    Raises:
        ValueError: ``dims`` is of another type, names dimensions that the mesh does not have, or names dimensions to
            shard over that are not neighbours.
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
            raise ValueError(f"fully_shard: dp_mesh_dims: the mesh has no dimension {name!r}, only {names}.")
    if not shards:
        return flattened_mesh(mesh, replicas)
    first = names.index(shards[0])
    if names[first : first + len(shards)] != shards:
        raise ValueError(
            f"fully_shard: dp_mesh_dims: shard={shards} must be neighbours in the mesh's order, which is {names}."
        )
    over = flattened_mesh(mesh, shards)
    return over if not replicas else concatenate_meshes([flattened_mesh(mesh, replicas), over])
