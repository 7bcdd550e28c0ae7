"""A process group without other processes, for what needs a group but no communication."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def fake_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """Be `rank` of `world_size` ranks that do not exist, in this process. Collectives return at once, with nothing done.

    What was compiled is forgotten afterwards, or the next test would find Dynamo at its recompile limit.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch.compiler.reset()
