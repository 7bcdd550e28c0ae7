"""The passes in order. Read this file first.

On the joint graph, before it is cut into forward and backward:

    reshard    mark the reads that backward gathers again, and everything computed from parameters alone

On both halves, if backward gathers over fewer ranks (``reshard_after_forward=8``):

    regather   save this rank's part of the full parameter in forward, so that backward gathers from it

On each graph (forward, backward, or inference), after the cut:

    arrange    one gather per shard, at its first use; one reduction per parameter, after its gradient
    start_copies  start the copies of activations to host memory and back, and wait for them later
    plan       choose buckets, their form, and the places of launches and waits; agree on them with the other ranks
    bucket     replace single reads and reductions by the plan's buckets
    schedule   move launches and waits to the plan's places, so that compute runs between them
    lower      replace bucket ops by tensor operations, or Triton kernels, and _c10d_functional collectives
    verify     check that the lowered graph follows the plan and holds no more than the memory budget

If this rank's code follows a plan that was made for other code, its graphs get these passes instead: arrange, follow
(the runtime gathers and reduces), lower.

Last, if Inductor generates the code, and once all is reported:

    share      turn compute that equal layers repeat into functions, whose code is generated once

A pass is a function ``name(gm, ctx) -> gm`` (on halves ``name(forward, backward, ctx)``). At its end it lints the graph
and reports one line about its changes with ``ctx.changed``. The option ``disable_passes`` switches passes off by name.
``TORCH_LOGS=+compiled_fsdp`` shows the line of each pass with its time; ``TORCH_LOGS=+compiled_fsdp.passes.diff`` shows
the changes in the graph's text.
"""

# Why: docs/design/torch.md, "Passes run before Inductor's cache"

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from torch.fx import GraphModule

from compiled_fsdp.passes import diff
from compiled_fsdp.passes.arrange import arrange
from compiled_fsdp.passes.bucket import bucket
from compiled_fsdp.passes.context import PassContext
from compiled_fsdp.passes.follow import follow
from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.plan_pass import plan
from compiled_fsdp.passes.regather import regather
from compiled_fsdp.passes.reshard import reshard
from compiled_fsdp.passes.schedule import schedule
from compiled_fsdp.passes.share import share
from compiled_fsdp.passes.start_copies import start_copies
from compiled_fsdp.passes.verify import check_graph, verify

log = logging.getLogger(__name__)

Graphs = dict[str, GraphModule]  # by phase
Pass = Callable[[GraphModule, PassContext], GraphModule]
PassOnHalves = Callable[[GraphModule, GraphModule, PassContext], None]

JOINT_PASSES: tuple[Pass, ...] = (reshard,)
HALVES_PASSES: tuple[PassOnHalves, ...] = (regather,)
GRAPH_PASSES: tuple[Pass, ...] = (arrange, start_copies, plan, bucket, schedule, lower, verify)
FOLLOWING_PASSES: tuple[Pass, ...] = (arrange, follow, lower)
INDUCTOR_PASSES: tuple[Pass, ...] = (share,)


def pass_names() -> tuple[str, ...]:
    """The names of all passes, which the option ``disable_passes`` takes."""
    return tuple(p.__name__ for p in (*JOINT_PASSES, *HALVES_PASSES, *GRAPH_PASSES, *INDUCTOR_PASSES))


def through(name: str) -> tuple[Pass, ...]:
    """The passes of ``GRAPH_PASSES`` up to the one of this name, which is the last."""
    return GRAPH_PASSES[: [p.__name__ for p in GRAPH_PASSES].index(name) + 1]


def run_passes(passes: tuple[Pass, ...], gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Run ``passes`` on one graph in order, except those that are switched off."""
    for run in passes:
        gm = _run_pass(run, {ctx.phase: gm}, ctx)[ctx.phase]
    return gm


def run_on_halves(forward: GraphModule, backward: GraphModule, ctx: PassContext) -> None:
    """Run ``HALVES_PASSES``, which change both halves of a joint graph in place, except those that are switched off."""
    for run in HALVES_PASSES:
        _run_pass(run, {"forward": forward, "backward": backward}, ctx)


def _run_pass(run: Callable[..., GraphModule | None], graphs: Graphs, ctx: PassContext) -> Graphs:
    """Run one pass on one graph or on two; check the result, record it, and log the pass's line."""
    name = run.__name__
    if name in ctx.disabled_passes:
        ctx.changed(name, "switched off")
        _log_pass(name, 0, ctx)
        return graphs
    texts, start = {phase: diff.text_of(gm) for phase, gm in graphs.items()}, time.perf_counter()
    result = run(*graphs.values(), ctx)
    if result is not None:
        graphs = dict.fromkeys(graphs, result)
    _log_pass(name, time.perf_counter() - start, ctx)
    for phase, gm in graphs.items():
        diff.log_changes(f"{phase} graph, {name}", texts[phase], gm)
        if ctx.verify_level == "full":
            check_graph(gm, after=name)
        ctx.record(name, gm)
    return graphs


def _log_pass(name: str, seconds: float, ctx: PassContext) -> None:
    """Log the pass's line, which ``TORCH_LOGS=+compiled_fsdp`` shows; a pass that had nothing to do has none."""
    if name in ctx.summary:
        log.debug("%s graph, %s: %s, in %.1f ms", ctx.phase, name, ctx.summary[name], 1e3 * seconds)
