"""The process groups that a parameter is sharded and replicated over, and their number in graphs."""

# Why: docs/design.md, note N4; docs/design.md, note N37

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from compiled_fsdp.buckets.transport import GroupNames

# By name, for good: the number is guarded on, and the next model over a group shall find the last one's code.
_ids: dict[tuple[str, ...], int] = {}
# Weak, so that the process group goes with the last model that it shards.
_groups: weakref.WeakValueDictionary[tuple[str, ...], ShardGroup] = weakref.WeakValueDictionary()
# By the group that gathers: those that only reduce, and those of a part of its ranks.
_reduce_scatter_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
_subgroups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, ShardGroup]] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class ShardGroup:
    """The process groups of one mesh that shards parameters, and with HSDP replicates them."""

    # Where parameters are gathered.
    process_group: dist.ProcessGroup
    # The replicas of this rank's shards; None without replicas.
    replicate_group: dist.ProcessGroup | None
    # Part of the compile caches' key.
    mesh_shape: tuple[int, ...]
    # All ranks that must run the same collectives in the same order: of the whole mesh, tensor parallelism included.
    ranks: tuple[int, ...]
    # Where gradients are reduced, if not where parameters are gathered.
    reduce_scatter_group: dist.ProcessGroup | None = None
    # Numbers the groups' names by first use in this process. A graph says it instead of the names, which differ between
    # ranks on a mesh of two dimensions; the backend renumbers it by first use in the region that it compiles.
    group_id: int = field(init=False)

    def __post_init__(self) -> None:
        self.group_id = _ids.setdefault(self.names, len(_ids))

    @property
    def name(self) -> str:
        """Of the group that gathers."""
        return self.process_group.group_name

    @property
    def replicate_name(self) -> str:
        """The name of the replicas' group; "" without one."""
        return "" if self.replicate_group is None else self.replicate_group.group_name

    @property
    def reduce_scatter_name(self) -> str:
        """The name of the group in which gradients are reduced."""
        return self.name if self.reduce_scatter_group is None else self.reduce_scatter_group.group_name

    @property
    def names(self) -> tuple[str, ...]:
        """Those of its process groups."""
        return self.name, self.replicate_name, self.reduce_scatter_name

    @cached_property
    def group_names(self) -> GroupNames:
        """The same as collectives take them."""
        replicate = self.replicate_name if self.replicas > 1 else None
        return GroupNames(self.name, self.reduce_scatter_name, replicate, self.rank)

    @property
    def rank(self) -> int:
        """This rank's number among the shards."""
        return self.process_group.rank()

    @property
    def place(self) -> int:
        """This rank's among ``ranks``."""
        return self.ranks.index(dist.get_rank())

    @property
    def size(self) -> int:
        """The number of shards."""
        return self.process_group.size()

    @property
    def replicas(self) -> int:
        """How many ranks hold the same shard."""
        return 1 if self.replicate_group is None else self.replicate_group.size()

    @property
    def gather_ranks(self) -> list[int]:
        """The global ranks that shard."""
        return dist.get_process_group_ranks(self.process_group)

    @property
    def replicate_ranks(self) -> list[int]:
        """The global ranks that hold this rank's shards; none without replicas."""
        return [] if self.replicate_group is None else dist.get_process_group_ranks(self.replicate_group)

    def backend_of(self, device_type: str) -> str:
        """The name of the backend that communicates tensors on a device ("cpu", "cuda"); "" where there is none."""
        backends = dict(part.split(":") for part in dist.get_backend_config(self.process_group).split(","))
        return backends.get(device_type, "")

    @property
    def ranks_in_all(self) -> int:
        """How many ranks a gradient is averaged over."""
        return self.size * self.replicas

    def with_separate_reduce_scatter(self, separate: bool) -> ShardGroup:
        """The same with a group of its own for reductions, or without."""
        if (self.reduce_scatter_group is not None) == separate:
            return self
        if separate and self.process_group not in _reduce_scatter_groups:
            _reduce_scatter_groups[self.process_group] = _new(dist.get_process_group_ranks(self.process_group))
        made = _reduce_scatter_groups[self.process_group] if separate else None
        return _known(ShardGroup(self.process_group, self.replicate_group, self.mesh_shape, self.ranks, made))


def _known(group: ShardGroup) -> ShardGroup:
    """The object that is used for these groups already, or ``group``."""
    key = *group.names, ",".join(map(str, group.ranks))
    known = _groups.get(key)
    if known is None or known.process_group is not group.process_group:
        known = _groups[key] = group
    return known


def _new(ranks: list[int]) -> dist.ProcessGroup:
    # local: only these ranks have to come, and of a slice of a mesh no others do
    group = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def subgroup_of(group: dist.ProcessGroup, ranks: int) -> ShardGroup:
    """Of every ``ranks`` neighbours in ``group`` those with this one: a collective call of theirs the first time."""
    subgroups = _subgroups.setdefault(group, {})
    if ranks not in subgroups:
        first = group.rank() // ranks * ranks
        members = dist.get_process_group_ranks(group)[first : first + ranks]
        subgroups[ranks] = ShardGroup(_new(members), None, (ranks,), tuple(members))
    return subgroups[ranks]


def shard_group(mesh: DeviceMesh, whole: DeviceMesh | None = None) -> ShardGroup:
    """The groups of a 1-D mesh (shards), or of a 2-D one (replicas, shards).

    The same object for every mesh over the same groups. ``whole`` is the mesh with tensor parallelism's dimensions, if
    there are any.
    """
    process_group = mesh.get_group(mesh.ndim - 1)
    replicate_group = mesh.get_group(0) if mesh.ndim == 2 else None
    every = (whole if whole is not None else mesh).mesh
    ranks = tuple(sorted(every.flatten().tolist()))
    return _known(ShardGroup(process_group, replicate_group, tuple(every.shape), ranks))
