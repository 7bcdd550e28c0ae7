"""A plain FSDP made of functional collectives, for comparison: Inductor compiles it alone or with torch's passes.

Each parameter is a shard; reading it gathers it by ``_c10d_functional``, and its gradient is reduced the same way.
Under ``torch.compile`` the gathers are in the graph, and marks on the joint graph make backward gather again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

c10d = torch.ops._c10d_functional


class Gather(torch.autograd.Function):
    """All-gather ``[n / world, ...]`` to ``[n, ...]``; backward averages the gradient and keeps this rank's shard."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, world: int, group: str) -> Tensor:
        ctx.layout = world, group
        return c10d.wait_tensor(c10d.all_gather_into_tensor(shard, world, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(grad.contiguous(), "avg", *ctx.layout)), None, None


def shard(model: nn.Module) -> None:
    """Replace every parameter of ``model`` by its shard on dimension 0. Reading the attribute gathers it.

    Raises:
        ValueError: the world size does not divide a parameter's dimension 0.
    """
    default = dist.distributed_c10d._get_default_group()
    rank, world, group = default.rank(), default.size(), default.group_name
    classes: dict[type, type] = {}  # so that equal layers have one class
    for module in model.modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if not names:
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            full = parameter.detach()
            if full.shape[0] % world:
                raise ValueError(f"{name}: dimension 0 of {list(full.shape)} is not a multiple of {world}")
            module._parameters[name] = nn.Parameter(full.chunk(world)[rank].clone())
        kind = type(module)
        if kind not in classes:
            classes[kind] = type(f"Gathering{kind.__name__}", (kind,), {n: _property(n, world, group) for n in names})
        module.__class__ = classes[kind]


def _property(name: str, world: int, group: str) -> property:
    return property(lambda module: Gather.apply(module._parameters[name], world, group))


def gather_again_in_backward(graph: torch.fx.Graph) -> None:
    """Mark the gathers of a joint graph for recomputation, as selective activation checkpointing does."""
    for node in graph.nodes:
        if node.target is c10d.all_gather_into_tensor.default:
            for part in (node, *(user for user in node.users if user.target is c10d.wait_tensor.default)):
                part.meta["recompute"], part.meta["ac_graph_id"] = CheckpointPolicy.MUST_RECOMPUTE, 100_000


def compiled(model: nn.Module, overlap: bool) -> Callable[[Tensor], Tensor]:
    """Compile ``model`` by Inductor; ``overlap`` switches on torch's overlap scheduling and bucketing."""
    options: dict[str, Any] = {"joint_custom_post_pass": gather_again_in_backward}
    if overlap:
        prefix = "aten_distributed_optimizations."
        options |= {
            f"{prefix}enable_overlap_scheduling": True,
            f"{prefix}collective_bucketing": True,
            f"{prefix}insert_overlap_deps": True,
            f"{prefix}compute_estimator": "analytical",
            f"{prefix}collective_estimator": "analytical",
        }
    return torch.compile(model, options=options)


@contextlib.contextmanager
def this_machine_as_gpu(gbit: float) -> Iterator[None]:
    """Give torch's cost model, which knows only GPUs, this CPU's measured speed and the link's rate, in Gb/s.

    Enter it while the model is compiled. Torch's formulas then see the real ratio of compute to communication.
    """
    from torch._inductor import comm_analysis, config
    from torch.utils import _runtime_estimation

    both = torch.tensor([measured_tflops(), measured_gbps()], dtype=torch.float64)
    dist.broadcast(both, 0)  # else each rank chooses buckets by its own clock; they differ, and gloo aborts
    tflops, gbps = both.tolist()
    ampere = comm_analysis.NVIDIA_GPU_TYPE.AMPERE
    patches = [
        (_runtime_estimation, "get_device_tflops", _always(tflops)),
        (_runtime_estimation, "get_gpu_dram_gbps", _always(gbps)),
        (_runtime_estimation, "get_device_dram_gbps", _always(gbps)),  # the name in later torch versions
        (comm_analysis, "get_gpu_type", _always(ampere)),
        (comm_analysis, "_has_nvlink", _always(False)),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(config.patch(intra_node_bw=gbit / 8, inter_node_bw=gbit / 8))  # GB/s
        yield


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def measured_tflops() -> float:
    """Return the speed of a float32 matrix product, in 10^12 operations a second."""
    a, b = torch.randn(256, 1024), torch.randn(1024, 4096)
    return 2 * 256 * 1024 * 4096 / _seconds(lambda: a @ b) / 1e12


def measured_gbps() -> float:
    """Return the rate at which a copy reads and writes memory, in 10^9 bytes a second."""
    a, b = torch.zeros(1 << 24), torch.zeros(1 << 24)
    return 2 * 4 * (1 << 24) / _seconds(lambda: b.copy_(a)) / 1e9


def _seconds(run: Callable[[], Any], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
