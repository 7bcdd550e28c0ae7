"""How one parameter lies on the meshes: what of it is sharded, over which groups, and its DTensor."""

# Why: docs/design.md, note N1

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
    """A parameter's place."""

    # Of its DTensor: data parallel first, replicas before shards, then tensor parallel.
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    # Who shards and replicates it.
    group: ShardGroup
    # The sharded dimension.
    dim: int
    # Of the whole parameter.
    shape: torch.Size
    stride: tuple[int, ...]
    # This rank's part of ``shape`` under tensor parallelism, which data parallelism shards.
    size: tuple[int, ...]
    # What the parameter was before, and is in forward; None for a plain tensor.
    inner_mesh: DeviceMesh | None = None
    inner_placements: tuple[Placement, ...] = ()
    # Makes that of a full local tensor, where gradients need more than ``DTensor.from_local``; see ``_FromFull``.
    from_full: Callable[[torch.Tensor], torch.Tensor] | None = field(default=None, compare=False)

    @property
    def padded(self) -> list[int]:
        """The shard's shape, the same on all ranks."""
        return [-(-n // self.group.size) if i == self.dim else n for i, n in enumerate(self.size)]

    @property
    def start(self) -> int:
        """Where this rank's rows begin, in ``size[dim]``.

        They are ``torch.chunk``'s: the last ranks have fewer, or none.
        """
        return min(self.group.rank * self.padded[self.dim], self.size[self.dim])

    @property
    def rows(self) -> int:
        """How many there are on this rank."""
        return min(self.padded[self.dim], self.size[self.dim] - self.start)

    @property
    def largest(self) -> tuple[int, ...]:
        """``size`` on the ranks that have the most.

        It is for plans, which are the same on all ranks, while tensor parallelism may be uneven.
        """
        size = list(self.shape)
        for i, placement in enumerate(self.inner_placements):
            if isinstance(placement, Shard):
                assert self.inner_mesh is not None
                size[placement.dim] = -(-size[placement.dim] // self.inner_mesh.size(i))
        return tuple(size)

    def shard_of(self, local: torch.Tensor) -> torch.Tensor:
        """The padded shard, of ``size``'s tensor."""
        shard = local.new_zeros(self.padded)
        if self.rows > 0:
            # FSDP2's own calls: tensors that are made of others may know no more
            rows = local.chunk(self.group.size, self.dim)[self.group.rank]
            shard.narrow(self.dim, 0, self.rows).copy_(rows)
        return shard

    def dtensor(self, local: torch.Tensor) -> DTensor:
        """The parameter's DTensor around this rank's rows, wherever they are.

        ``DTensor.from_local`` would move an offloaded shard to the mesh's device, and take a view of it, which a
        wrapper of tensors may not know.
        """
        like = torch.empty(local.shape, dtype=local.dtype, device="meta")
        dtensor = DTensor.from_local(
            like, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        return dtensor_like(dtensor, local)

    def in_forward(self, full: torch.Tensor) -> torch.Tensor:
        """What a forward computes with: ``full`` of ``size``, under tensor parallelism as the DTensor that it was."""
        if self.inner_mesh is None:
            return full
        if self.from_full is not None:
            return self.from_full(full)
        return DTensor.from_local(
            full, self.inner_mesh, self.inner_placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def fits(self, other: Any) -> bool:
        """Whether ``other`` is a DTensor that lies in the same way."""
        return (
            isinstance(other, DTensor)
            and other.shape == self.shape
            and other.device_mesh == self.mesh
            and tuple(other.placements) == self.placements
        )

    def __str__(self) -> str:
        return f"shape {tuple(self.shape)} with placements {self.placements}"


def layout_of(name: str, param: nn.Parameter, mesh: DeviceMesh, dim: int, full_mesh: FullMesh | None = None) -> Layout:
    """The layout of ``param``, sharded on ``dim`` over a 1-D mesh (shards), or a 2-D one (replicas, shards).

    With ``full_mesh`` the mesh has some of its dimensions.

    Raises:
        NotImplementedError: rows that cannot be divided evenly, on a dimension other than 0, or tensor parallelism on
            too many mesh dimensions.
        ValueError: tensor parallelism on a mesh that has no common root with ``mesh``, or a parameter that is not on
            ``full_mesh``.
    """
    outer: tuple[Placement, ...] = (Replicate(), Shard(dim)) if mesh.ndim == 2 else (Shard(dim),)
    if full_mesh is not None:
        layout = _on_full_mesh(name, param, mesh, dim, full_mesh)
    elif not isinstance(param, DTensor):
        layout = Layout(mesh, outer, shard_group(mesh), dim, param.shape, param.stride(), tuple(param.shape))
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
            f"fully_shard: parameter {name} is a DTensor on {len(placements)} mesh dimensions; of tensor and expert "
            "parallelism at most two are supported."
        )
    if any(p.is_partial() for p in placements):
        raise NotImplementedError(
            f"fully_shard: parameter {name} is a DTensor with placements {placements}; redistribute Partial to "
            "Replicate or Shard first."
        )
    try:
        whole = concatenate_meshes([mesh, inner])
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:  # the last one for meshes without names
        raise ValueError(
            f"fully_shard: parameter {name} is a DTensor on mesh {inner}, which cannot be joined with mesh={mesh}: "
            f"{error}. Make both as slices "
            'of one mesh: mesh = init_device_mesh("cuda", (dp, tp), mesh_dim_names=("dp", "tp")); fully_shard(model, '
            'mesh=mesh["dp"]).'
        ) from error
    # shards of the same dimension inside of data parallelism's: each of them is cut, so ranks hold strided pieces
    split = math.prod(inner.size(i) for i, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim)
    if split > 1:
        outer = (*outer[:-1], strided_shard(dim, split))
    size = tuple(param.to_local().shape)
    group, spread = shard_group(mesh, whole), (*outer, *placements)
    return Layout(whole, spread, group, dim, param.shape, param.stride(), size, inner, placements)


def _on_full_mesh(name: str, param: Any, mesh: DeviceMesh, dim: int, full: FullMesh) -> Layout:
    full.check(name, param)
    before = tuple(param.placements)
    where, placements = full.sharded(before, dim, mesh)
    from_full = _from_full(full.mesh, before, param.shape, param.stride(), (*full.shards, *full.replicas))
    group, size = shard_group(mesh, full.mesh), tuple(param.to_local().shape)
    return Layout(where, placements, group, dim, param.shape, param.stride(), size, full.mesh, before, from_full)


class _FromFull(torch.autograd.Function):
    """``DTensor.from_local`` of a full parameter on a full mesh, and what is reduced of its gradient.

    As FSDP2 has it: along data parallelism the gradient's own local tensor is taken, whether it says Partial or
    Replicate, for there it is reduced; along other dimensions it is redistributed to the parameter's placements first.
    (``grad_placements`` of ``DTensor.from_local`` would divide a Replicate on its way to Partial.)
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
    """``_FromFull`` with everything but the tensor bound, one function for equal parameters.

    Dynamo puts it into the graph as it is, and AOTAutograd sees the placements that gradients really have.
    """

    @torch.compiler.allow_in_graph
    def from_full(full: torch.Tensor) -> torch.Tensor:
        return _FromFull.apply(full, mesh, placements, shape, stride, dims)

    return from_full
