"""The process groups that a parameter is sharded and replicated over, and the number that stands for them in graphs."""

# Why: docs/design/reads.md, "Graphs name no ranks and no layers"
# Why: docs/design/torch.md, "Guards do not depend on counters"

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from compiled_fsdp.buckets.transport import GroupNames

# Group numbers by the groups' names. They are never dropped, because Dynamo guards on the number: a later model over
# the same groups gets the same number, and can run the compiled code of an earlier one.
_ids: dict[tuple[str, ...], int] = {}
# Weak, so that a process group is freed together with the last model that is sharded over it.
_groups: weakref.WeakValueDictionary[tuple[str, ...], ShardGroup] = weakref.WeakValueDictionary()
# Both are keyed by the group that gathers: its separate group for reductions, and the groups of a part of its ranks.
_reduce_scatter_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
_subgroups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, int], ShardGroup]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(eq=False)
class ShardGroup:
    """The process groups of one mesh, which shards parameters, replicates them, or does both (HSDP)."""

    # The group that gathers parameters. None if the mesh only replicates, because every rank has whole parameters.
    process_group: dist.ProcessGroup | None
    # The ranks that hold the same shards as this rank; None without replicas.
    replicate_group: dist.ProcessGroup | None
    # Part of the compile caches' key.
    mesh_shape: tuple[int, ...]
    # All ranks that must launch the same collectives in the same order: the whole mesh, tensor parallelism included.
    ranks: tuple[int, ...]
    # The group that reduces gradients, if it is not the group that gathers.
    reduce_scatter_group: dist.ProcessGroup | None = None
    # The number of these groups' names, by first use in this process. Graphs hold it instead of the names, because on a
    # 2-D mesh the names differ between ranks. The backend numbers groups again, by first use in a compiled region.
    group_id: int = field(init=False)

    def __post_init__(self) -> None:
        self.group_id = _ids.setdefault(self.names, len(_ids))

    @property
    def name(self) -> str:
        """The name of the group that gathers; "" without one."""
        return "" if self.process_group is None else self.process_group.group_name

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
        """The names of its process groups: gather, replicas, reductions."""
        return self.name, self.replicate_name, self.reduce_scatter_name

    @cached_property
    def group_names(self) -> GroupNames:
        """The names in the form that functional collectives take."""
        replicate = self.replicate_name if self.replicas > 1 else None
        replica = 0 if self.replicate_group is None else self.replicate_group.rank()
        return GroupNames(self.name, self.reduce_scatter_name, replicate, self.rank, replica)

    @property
    def rank(self) -> int:
        """This rank's index among the shards."""
        return 0 if self.process_group is None else self.process_group.rank()

    @property
    def place(self) -> int:
        """This rank's index in ``ranks``."""
        return self.ranks.index(dist.get_rank())

    @property
    def size(self) -> int:
        """The number of shards."""
        return 1 if self.process_group is None else self.process_group.size()

    @property
    def replicas(self) -> int:
        """The number of ranks that hold the same shard."""
        return 1 if self.replicate_group is None else self.replicate_group.size()

    @property
    def gather_ranks(self) -> list[int]:
        """The global ranks of the group that gathers."""
        return [dist.get_rank()] if self.process_group is None else dist.get_process_group_ranks(self.process_group)

    @property
    def replicate_ranks(self) -> list[int]:
        """The global ranks that hold the same shards as this rank; empty without replicas."""
        return [] if self.replicate_group is None else dist.get_process_group_ranks(self.replicate_group)

    @property
    def group_of_all(self) -> dist.ProcessGroup | None:
        """The process group that consists of ``ranks``; None if no group of the mesh has all of them."""
        groups = self.process_group, self.replicate_group
        return next((group for group in groups if group is not None and group.size() == len(self.ranks)), None)

    def backend_of(self, device_type: str) -> str:
        """The name of the backend that communicates tensors on a device type ("cpu", "cuda"); "" if there is none."""
        backends = dict(part.split(":") for part in dist.get_backend_config(self.first_group).split(","))
        return backends.get(device_type, "")

    @property
    def first_group(self) -> dist.ProcessGroup:
        """The group that gathers; if the mesh only replicates, the replicas' group."""
        group = self.replicate_group if self.process_group is None else self.process_group
        assert group is not None
        return group

    @property
    def ranks_in_all(self) -> int:
        """The number of ranks that a gradient is averaged over."""
        return self.size * self.replicas

    def part_of(self, ranks: int) -> ShardGroup:
        """The group of ``ranks`` neighbours among the shards, with this rank; the first call is a collective call.

        Once ``across_parts(ranks)`` was called, that group takes the place of its replicas'.
        """
        assert self.process_group is not None
        return subgroup_of(self.process_group, ranks)

    def across_parts(self, ranks: int) -> ShardGroup:
        """The group of the ranks at this rank's place in every ``part_of(ranks)``; the first call is a collective call.

        For example, with 4 shards and ``ranks=2`` it is the group of ranks 0 and 2, or of ranks 1 and 3.
        """
        assert self.process_group is not None
        part, across = self.part_of(ranks), subgroup_of(self.process_group, self.size // ranks, step=ranks)
        if part.replicate_group is None:
            shape = self.size // ranks, ranks
            both = ShardGroup(part.process_group, across.process_group, shape, tuple(self.gather_ranks))
            _subgroups[self.process_group][ranks, 1] = both
        return across

    def with_separate_reduce_scatter(self, separate: bool) -> ShardGroup:
        """Return these groups with a separate group for reductions, or without: a collective call the first time."""
        if (self.reduce_scatter_group is not None) == separate or self.process_group is None:
            return self
        if separate and self.process_group not in _reduce_scatter_groups:
            _reduce_scatter_groups[self.process_group] = _new(dist.get_process_group_ranks(self.process_group))
        made = _reduce_scatter_groups[self.process_group] if separate else None
        return _known(ShardGroup(self.process_group, self.replicate_group, self.mesh_shape, self.ranks, made))


def _known(group: ShardGroup) -> ShardGroup:
    """Return the object that exists for these groups already, or else ``group``."""
    key = *group.names, ",".join(map(str, group.ranks))
    known = _groups.get(key)
    if known is None or known.first_group is not group.first_group:
        known = _groups[key] = group
    return known


def _new(ranks: list[int]) -> dist.ProcessGroup:
    # local, so that only these ranks have to call it: if the mesh is a slice of a larger one, the other ranks do not
    group = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def subgroup_of(group: dist.ProcessGroup, ranks: int, step: int = 1) -> ShardGroup:
    """The group of ``ranks`` neighbours in ``group`` with this rank; its ranks must all make the first call.

    With a ``step``, the members' numbers in ``group`` differ by it.
    """
    subgroups = _subgroups.setdefault(group, {})
    if (ranks, step) not in subgroups:
        first = group.rank() // (ranks * step) * ranks * step + group.rank() % step
        members = dist.get_process_group_ranks(group)[first : first + ranks * step : step]
        subgroups[ranks, step] = ShardGroup(_new(members), None, (ranks,), tuple(members))
    return subgroups[ranks, step]


def shard_group(mesh: DeviceMesh, whole: DeviceMesh | None = None, *, replicates: bool = False) -> ShardGroup:
    """The groups of a 1-D mesh (shards) or of a 2-D mesh (replicas, shards).

    Every mesh over the same groups gives the same object.

    Args:
        mesh: the data-parallel mesh.
        whole: the mesh with the dimensions of tensor parallelism, if there are any.
        replicates: whether a 1-D mesh replicates instead of sharding.
    """
    process_group = None if replicates else mesh.get_group(mesh.ndim - 1)
    replicate_group = mesh.get_group(0) if replicates or mesh.ndim == 2 else None
    every = (whole if whole is not None else mesh).mesh
    ranks = tuple(sorted(every.flatten().tolist()))
    return _known(ShardGroup(process_group, replicate_group, tuple(every.shape), ranks))
