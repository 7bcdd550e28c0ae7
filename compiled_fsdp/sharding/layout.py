"""The layout of one parameter: its sharded dimension, the process groups that share it, and its DTensor."""

# Why: docs/design/reads.md, "Shards are padded to equal sizes"

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from compiled_fsdp.compat.autograd import concatenate_meshes, dtensor_like, strided_shard
from compiled_fsdp.sharding.full_mesh import FullMesh
from compiled_fsdp.sharding.process_groups import ShardGroup, shard_group


@dataclass(frozen=True)
class Layout:
    """How one parameter is divided among ranks."""

    # The DTensor's mesh and placements. Without ``dp_mesh_dims`` data parallelism is first (replicas, then shards), and
    # tensor parallelism follows.
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    # The process groups that shard and replicate it.
    group: ShardGroup
    # The sharded dimension of the tensor.
    dim: int
    # The shape and stride of the whole parameter, over all kinds of parallelism.
    shape: torch.Size
    stride: tuple[int, ...]
    # The shape of the tensor that data parallelism shards: under tensor parallelism this rank's part of ``shape``.
    size: tuple[int, ...]
    # Under tensor parallelism, the mesh and placements of the DTensor that the user passes to ``fully_shard`` and that
    # forward computes with. None for a plain tensor.
    inner_mesh: DeviceMesh | None = None
    inner_placements: tuple[Placement, ...] = ()
    # Makes that DTensor from a full local tensor, if the gradient needs more than the backward of
    # ``DTensor.from_local``; see ``_FromFull``.
    from_full: Callable[[torch.Tensor], torch.Tensor] | None = field(default=None, compare=False)

    @property
    def padded(self) -> list[int]:
        """The shape of the padded shard, the same on all ranks."""
        return [-(-n // self.group.size) if i == self.dim else n for i, n in enumerate(self.size)]

    @property
    def start(self) -> int:
        """The index in dimension ``dim`` of this rank's first row.

        Rows are divided as by ``torch.chunk``. For example, of 5 rows 4 ranks have 2, 2, 1 and 0.
        """
        return min(self.group.rank * self.padded[self.dim], self.size[self.dim])

    @property
    def rows(self) -> int:
        """The number of rows that this rank has, without padding."""
        return min(self.padded[self.dim], self.size[self.dim] - self.start)

    @property
    def largest(self) -> tuple[int, ...]:
        """The largest ``size`` of any rank; tensor parallelism may be uneven.

        Plans are made with it, because they must be the same on all ranks.
        """
        size = list(self.shape)
        for i, placement in enumerate(self.inner_placements):
            if isinstance(placement, Shard):
                assert self.inner_mesh is not None
                size[placement.dim] = -(-size[placement.dim] // self.inner_mesh.size(i))
        return tuple(size)

    def shard_of(self, local: torch.Tensor) -> torch.Tensor:
        """Cut this rank's padded shard out of ``local``, a tensor of shape ``size``."""
        shard = local.new_zeros(self.padded)
        if self.rows > 0:
            # the same calls as in FSDP2, because a wrapper subclass may implement no others
            rows = local.chunk(self.group.size, self.dim)[self.group.rank]
            shard.narrow(self.dim, 0, self.rows).copy_(rows)
        return shard

    def dtensor(self, local: torch.Tensor) -> DTensor:
        """Make the parameter's DTensor around ``local``, this rank's rows, on the device where they are.

        ``DTensor.from_local`` alone would move an offloaded shard to the mesh's device. It would also take a view of
        the shard, which a wrapper subclass may not implement.
        """
        like = torch.empty(local.shape, dtype=local.dtype, device="meta")
        dtensor = DTensor.from_local(
            like, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        return dtensor_like(dtensor, local)

    def in_forward(self, full: torch.Tensor) -> torch.Tensor:
        """The tensor that a forward computes with: ``full``, of shape ``size``, or a tensor-parallel DTensor of it."""
        if self.inner_mesh is None:
            return full
        if self.from_full is not None:
            return self.from_full(full)
        return DTensor.from_local(
            full, self.inner_mesh, self.inner_placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def fits(self, other: Any) -> bool:
        """Whether ``other`` is a DTensor with the same shape, mesh and placements."""
        return (
            isinstance(other, DTensor)
            and other.shape == self.shape
            and other.device_mesh == self.mesh
            and tuple(other.placements) == self.placements
        )

    def __str__(self) -> str:
        return f"shape {tuple(self.shape)} with placements {self.placements}"


def layout_of(
    name: str, param: nn.Parameter, mesh: DeviceMesh, dim: int, full_mesh: FullMesh | None = None, *,
    replicates: bool = False,
) -> Layout:  # fmt: skip
    """Make the layout of ``param``, sharded on ``dim``.

    Args:
        name: the parameter's name, for messages.
        param: a plain tensor, or a DTensor under tensor parallelism.
        mesh: 1-D (shards) or 2-D (replicas, shards).
        dim: the dimension of ``param`` to shard.
        full_mesh: with ``dp_mesh_dims`` the mesh of all kinds of parallelism; ``mesh`` has some of its dimensions.
        replicates: whether every rank of the 1-D mesh holds the whole parameter, so that ``dim`` is not cut.

    Raises:
        NotImplementedError: ``dim`` is not 0 and does not divide evenly, or ``param`` is a DTensor on more than two
            mesh dimensions or with a Partial placement.
        ValueError: ``param`` is on a mesh that has no common root with ``mesh``, or is not on ``full_mesh``.
    """
    outer: tuple[Placement, ...] = (Replicate(), Shard(dim)) if mesh.ndim == 2 else (Shard(dim),)
    outer = (Replicate(),) if replicates else outer
    if full_mesh is not None:
        layout = _on_full_mesh(name, param, mesh, dim, full_mesh)
    elif not isinstance(param, DTensor):
        group = shard_group(mesh, replicates=replicates)
        layout = Layout(mesh, outer, group, dim, param.shape, param.stride(), tuple(param.shape))
    else:
        layout = _of_dtensor(name, param, mesh, dim, outer)
    if dim > 0 and layout.size[dim] % layout.group.size != 0:
        raise NotImplementedError(
            f"fully_shard: shard_placement_fn: uneven sharding on dim {dim} is not supported: {name} has size "
            f"{layout.size} and there are {layout.group.size} shards. Return Shard(0), or a dimension that they divide."
        )
    return layout


def _of_dtensor(name: str, param: Any, mesh: DeviceMesh, dim: int, outer: tuple[Placement, ...]) -> Layout:
    inner: DeviceMesh = param.device_mesh
    placements = tuple(param.placements)
    if len(placements) > 2:
        raise NotImplementedError(
            f"fully_shard: parameter {name} is a DTensor on {len(placements)} mesh dimensions; at most two are "
            "supported, for example expert and tensor parallelism."
        )
    if any(p.is_partial() for p in placements):
        raise NotImplementedError(
            f"fully_shard: parameter {name} is a DTensor with placements {placements}; redistribute Partial to "
            "Replicate or Shard first."
        )
    try:
        whole = concatenate_meshes([mesh, inner])
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:  # TypeError for meshes without names
        raise ValueError(
            f"fully_shard: parameter {name} is a DTensor on mesh {inner}, which cannot be joined with mesh={mesh}: "
            f"{error}. Make both as slices "
            'of one mesh: mesh = init_device_mesh("cuda", (dp, tp), mesh_dim_names=("dp", "tp")); fully_shard(model, '
            'mesh=mesh["dp"]).'
        ) from error
    # tensor parallelism has cut ``dim`` already, and data parallelism cuts each part, so a rank's rows are strided
    split = math.prod(inner.size(i) for i, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim)
    replicates = outer == (Replicate(),)
    if split > 1 and not replicates:
        outer = (*outer[:-1], strided_shard(dim, split))
    size = tuple(param.to_local().shape)
    group, spread = shard_group(mesh, whole, replicates=replicates), (*outer, *placements)
    return Layout(whole, spread, group, dim, param.shape, param.stride(), size, inner, placements)


def _on_full_mesh(name: str, param: Any, mesh: DeviceMesh, dim: int, full: FullMesh) -> Layout:
    full.check(name, param)
    before = tuple(param.placements)
    where, placements = full.sharded(before, dim, mesh)
    from_full = _from_full(full.mesh, before, param.shape, param.stride(), (*full.shards, *full.replicas))
    group = shard_group(mesh, full.mesh, replicates=not full.shards)
    size = tuple(param.to_local().shape)
    return Layout(where, placements, group, dim, param.shape, param.stride(), size, full.mesh, before, from_full)


class _FromFull(torch.autograd.Function):
    """``DTensor.from_local`` of a full parameter on a full mesh; backward returns the local gradient to be reduced.

    As in FSDP2, backward first redistributes the gradient to the parameter's placements along all dimensions that are
    not data parallel. Along data-parallel dimensions it takes the local gradient as it is, Partial or Replicate,
    because compiled_fsdp reduces it there. ``grad_placements`` of ``DTensor.from_local`` would divide a Replicate
    gradient, because it would convert it to Partial.
    """

    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size,
                stride: tuple[int, ...], data_parallel: tuple[int, ...]) -> DTensor:  # fmt: skip
        ctx.placements, ctx.data_parallel = placements, data_parallel
        return DTensor.from_local(full, mesh, placements, run_check=False, shape=shape, stride=stride)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[torch.Tensor | None, ...]:
        target = tuple(
            own if i in ctx.data_parallel else p
            for i, (own, p) in enumerate(zip(grad.placements, ctx.placements, strict=True))
        )
        if target != tuple(grad.placements):
            grad = grad.redistribute(placements=target)
        return grad.to_local(), *[None] * 5


@functools.cache
def _from_full(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: torch.Size,
    stride: tuple[int, ...],
    dims: tuple[int, ...],
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Bind all arguments of ``_FromFull`` except the tensor; equal parameters get the same function.

    Dynamo puts the function into the graph as it is, so that AOTAutograd sees the gradients' real placements.
    """

    @torch.compiler.allow_in_graph
    def from_full(full: torch.Tensor) -> torch.Tensor:
        return _FromFull.apply(full, mesh, placements, shape, stride, dims)

    return from_full
