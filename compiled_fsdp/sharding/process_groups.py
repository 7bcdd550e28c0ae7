"""The process groups that a parameter is sharded and replicated over, and their label in graphs."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# By name, for good: a label is guarded on, and the next model over a group shall find the last one's code.
_labels: dict[tuple[str, ...], int] = {}
# Weak, so that the process group goes with the last model that it shards.
_groups: weakref.WeakValueDictionary[tuple[str, ...], ShardGroup] = weakref.WeakValueDictionary()
# By the group that gathers: those that only reduce, and those of a part of its ranks.
_apart: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
_parts: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, ShardGroup]] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class ShardGroup:
    """A process group that shards, and with HSDP the one that its replicas form (``over_replicas``).

    ``label`` numbers the groups' names by first use in this process. It is what a graph says instead of the names, which
    differ between ranks on a mesh of two dimensions; our backend renumbers it by first use in the region it compiles.
    ``mesh_shape`` is part of the compile caches' key. ``ranks`` are all ranks that must run the same collectives in the same
    order: of the whole mesh, that of tensor parallelism included. ``reduces`` is where gradients are reduced, if not where
    parameters are gathered.
    """

    process_group: dist.ProcessGroup
    over_replicas: dist.ProcessGroup | None
    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    reduces: dist.ProcessGroup | None = None
    label: int = field(init=False)

    def __post_init__(self) -> None:
        self.label = _labels.setdefault(self.names, len(_labels))

    @property
    def name(self) -> str:
        return self.process_group.group_name

    @property
    def across(self) -> str:
        """The name of the replicas' group; "" without one."""
        return "" if self.over_replicas is None else self.over_replicas.group_name

    @property
    def reduce_name(self) -> str:
        """The name of the group in which gradients are reduced."""
        return self.name if self.reduces is None else self.reduces.group_name

    @property
    def names(self) -> tuple[str, ...]:
        """Those of its process groups."""
        return self.name, self.across, self.reduce_name

    @property
    def rank(self) -> int:
        return self.process_group.rank()

    @property
    def place(self) -> int:
        """This rank's among ``ranks``."""
        return self.ranks.index(dist.get_rank())

    @property
    def size(self) -> int:
        return self.process_group.size()

    @property
    def replicas(self) -> int:
        return 1 if self.over_replicas is None else self.over_replicas.size()

    @property
    def ranks_in_all(self) -> int:
        """How many ranks a gradient is averaged over."""
        return self.size * self.replicas

    def reducing_apart(self, apart: bool) -> ShardGroup:
        """The same with a group of its own for reductions, or without."""
        if (self.reduces is not None) == apart:
            return self
        if apart and self.process_group not in _apart:
            _apart[self.process_group] = _new(dist.get_process_group_ranks(self.process_group))
        made = _apart[self.process_group] if apart else None
        return _known(ShardGroup(self.process_group, self.over_replicas, self.mesh_shape, self.ranks, made))


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


def part_of(group: dist.ProcessGroup, ranks: int) -> ShardGroup:
    """Of every ``ranks`` neighbours in ``group`` those with this one: a collective call of theirs the first time."""
    parts = _parts.setdefault(group, {})
    if ranks not in parts:
        first = group.rank() // ranks * ranks
        members = dist.get_process_group_ranks(group)[first : first + ranks]
        parts[ranks] = ShardGroup(_new(members), None, (ranks,), tuple(members))
    return parts[ranks]


def shard_group(mesh: DeviceMesh, whole: DeviceMesh | None = None) -> ShardGroup:
    """The groups of a 1-D mesh (shards), or of a 2-D one (replicas, shards); the same object for every mesh over the same groups.

    ``whole`` is the mesh with tensor parallelism's dimensions, if there are any.
    """
    process_group = mesh.get_group(mesh.ndim - 1)
    across = mesh.get_group(0) if mesh.ndim == 2 else None
    ranks = tuple(sorted((whole if whole is not None else mesh).mesh.flatten().tolist()))
    return _known(ShardGroup(process_group, across, tuple((whole if whole is not None else mesh).mesh.shape), ranks))
