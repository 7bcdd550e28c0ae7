"""Process groups without other processes: one of ranks that do not exist, and one of this rank alone."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def fake_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """Be `rank` of `world_size` ranks that do not exist, in this process. Collectives return at once, with nothing
    done.

    What was compiled is forgotten afterwards, or the next test would find Dynamo at its recompile limit.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch.compiler.reset()


@contextlib.contextmanager
def one_rank(device: str) -> Iterator[None]:
    """Be the only rank of a group, with NCCL on "cuda" and gloo on "cpu"; tensors are made on that device."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        with torch.device(device):
            yield
    finally:
        if device == "cuda":
            torch.cuda.synchronize()
        dist.destroy_process_group()
        torch.compiler.reset()
