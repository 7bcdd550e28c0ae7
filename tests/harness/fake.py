"""Process groups without other processes: a group whose other ranks do not exist, and a group of this rank alone."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def fake_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """Make this process `rank` in a group of `world_size` ranks, of which the others do not exist.

    Collectives return at once and do nothing. Compiled code is dropped at the end, because the next test would
    otherwise find Dynamo at its recompile limit.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch.compiler.reset()


@contextlib.contextmanager
def one_rank(device: str) -> Iterator[None]:
    """Make this process the only rank of a group with NCCL on "cuda" and gloo on "cpu"; new tensors are on `device`."""
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
