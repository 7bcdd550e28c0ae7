"""Capture training graphs of large models, with a fake process group and without memory.

Parameters are on the meta device, so that even a 405B layer takes no memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule

from compiled_fsdp import fully_shard
from compiled_fsdp.compat.compilers import aot_compile
from compiled_fsdp.compat.graphs import copy_of, min_cut_partition
from compiled_fsdp.compat.modules import fake_store
from compiled_fsdp.compiler.region import find_region
from compiled_fsdp.frontend.gradient_methods import units_of
from compiled_fsdp.passes.context import Groups, PassContext
from compiled_fsdp.passes.cost import PROFILES
from compiled_fsdp.passes.pipeline import JOINT_PASSES, run_passes
from compiled_fsdp.passes.plan.choose import PlanRules
from compiled_fsdp.tools.cli.shapes import SHAPES as NAMED
from compiled_fsdp.tools.cli.shapes import Decoder, Shape

# Large models have few layers here, because more layers are planned in the same way.
SHAPES = (
    replace(NAMED["llama3-8b"], layers=8),
    replace(NAMED["llama3-70b"], layers=6),
    replace(NAMED["llama3-405b"], layers=4),
    Shape("moe-embedding", 2048, 16, 16, 2816, 6, 256000, experts=8, experts_every=2),
    Shape("small", 1024, 16, 16, 4096, 12, 50304),
)


class Summed(Decoder):
    """A decoder with the sum of its outputs as the loss."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).sum(dtype=torch.float32)


RULES = PlanRules()


@dataclass
class Captured:
    """The graphs of one training step before any graph pass, and a function that makes a context for them."""

    forward: GraphModule
    backward: GraphModule
    context: Callable[..., PassContext]
    # The number of nodes that the ranks are on; None: as few as possible.
    nodes: int | None = None


@contextlib.contextmanager
def fake_group(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of a group whose other ranks do not exist."""
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch.compiler.reset()


def capture(shape: Shape, world_size: int, tokens: int, hardware: str = "h100", nodes: int | None = None) -> Captured:
    """Capture forward and backward of a bfloat16 model with a unit for each layer.

    Call it inside ``fake_group``. Each rank has one sequence of ``tokens`` tokens. ``nodes`` is the number of nodes
    that the ranks are on; None: as few as possible.
    """
    with torch.device("meta"):
        model = Summed(shape).bfloat16()
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for unit in units_of(model):
        unit.raise_meta = lambda: None  # type: ignore[method-assign]  # nothing will run
    graphs: dict[str, GraphModule] = {}
    regions = []

    def backend(gm: GraphModule, inputs: list[object], **_: object) -> Callable[..., object]:
        region = find_region(gm, inputs)
        regions.append(region)

        def context(phase: str, rules: PlanRules = RULES) -> PassContext:
            reads = {read.index: read for read in region.reads}
            groups = {label: replace(Groups.one(group.name), nodes=nodes) for label, group in enumerate(region.groups)}
            return PassContext(phase, reads, groups, hardware=PROFILES[hardware], rules=rules)

        backend.context = context  # type: ignore[attr-defined]

        def partition(joint: GraphModule, joint_inputs: object, **kwargs: object) -> object:
            return min_cut_partition(run_passes(JOINT_PASSES, joint, context("joint")), joint_inputs, **kwargs)

        def keep(gm: GraphModule, phase: str) -> GraphModule:
            graphs[phase] = copy_of(gm)
            return gm

        aot_compile(gm, inputs, partition=partition, rewrite=keep, compiled=lambda gm, result: None)
        raise _Done

    with contextlib.suppress(_Done, torch._dynamo.exc.BackendCompilerFailed):
        torch.compile(model, backend=backend, fullgraph=True)(torch.zeros(1, tokens, dtype=torch.int64, device="meta"))
    if set(graphs) != {"forward", "backward"}:
        raise RuntimeError(f"captured {sorted(graphs)} of {shape.name}, not a forward and a backward graph")
    return Captured(graphs["forward"], graphs["backward"], backend.context, nodes)  # type: ignore[attr-defined]


class _Done(Exception):
    """Ends the capture: the graphs are there, and nothing has to run."""
