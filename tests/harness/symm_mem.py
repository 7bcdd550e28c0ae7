"""CPU kernels for torch's collectives over symmetric memory, which has only CUDA kernels for them."""

import contextlib
import functools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from compiled_fsdp.compat import symm_mem  # noqa: F401  defines the ops

_c10d = torch.ops._c10d_functional


def _all_gather(sent: Tensor, group_name: str) -> Tensor:
    world = _world(group_name)
    out = sent.new_empty(world * sent.shape[0], *sent.shape[1:])
    return _c10d.all_gather_into_tensor_out.default(sent, world, group_name, out=out)


def _reduce_scatter(sent: Tensor, reduce_op: str, group_name: str) -> Tensor:
    return _c10d.reduce_scatter_tensor.default(sent, reduce_op, _world(group_name), group_name)


def _world(group_name: str) -> int:
    return dist.get_world_size(dist.distributed_c10d._resolve_process_group(group_name))


@contextlib.contextmanager
def symm_mem_on_cpus() -> Iterator[None]:
    """Give the ops kernels for CPUs, by gloo: launched at once, and done at the wait, as on GPUs."""
    with torch.library._scoped_library("symm_mem", "IMPL") as library:
        library.impl("_low_contention_all_gather", _all_gather, "CPU")
        library.impl("_low_contention_reduce_scatter", _reduce_scatter, "CPU")
        yield


@functools.cache
def symm_mem_from_now_on() -> contextlib.ExitStack:
    """The same until the process ends."""
    stack = contextlib.ExitStack()
    stack.enter_context(symm_mem_on_cpus())
    return stack
