"""The process group that a mesh dimension shards over, and its label in graphs."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# By name, for good: a label is guarded on, and the next model over a group shall find the last one's code.
_labels: dict[str, int] = {}
# Weak, so that the process group goes with the last model that it shards.
_groups: weakref.WeakValueDictionary[str, ShardGroup] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class ShardGroup:
    """One process group.

    ``label`` numbers the group's name by first use in this process. It is what a graph says instead of the group's name, which
    differs between ranks on a mesh of two dimensions; our backend renumbers it by first use in the region it compiles.
    ``mesh_shape`` is part of the compile caches' key.
    """

    process_group: dist.ProcessGroup
    mesh_shape: tuple[int, ...]
    label: int = field(init=False)

    def __post_init__(self) -> None:
        self.label = _labels.setdefault(self.name, len(_labels))

    @property
    def name(self) -> str:
        return self.process_group.group_name

    @property
    def rank(self) -> int:
        return self.process_group.rank()

    @property
    def size(self) -> int:
        return self.process_group.size()


def shard_group(mesh: DeviceMesh) -> ShardGroup:
    """The group of a 1-D mesh; the same object for every mesh over the same process group."""
    process_group = mesh.get_group()
    known = _groups.get(process_group.group_name)
    if known is None or known.process_group is not process_group:
        known = _groups[process_group.group_name] = ShardGroup(process_group, tuple(mesh.mesh.shape))
    return known
