"""Verify: check that the lowered graph follows the plan and holds no more than the memory budget.

The graph must launch the plan's collectives in the plan's order, and wait for each launch once before its result is
used. The model's own collectives must be those that the planner saw, in the same order, each with the same number of
compiled_fsdp's launches before it.
"""

# Why: docs/design/memory.md, "The memory budget is a hard limit"

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from torch.fx import GraphModule, Node

from compiled_fsdp.base.errors import CompiledFsdpError
from compiled_fsdp.buckets import host_copies
from compiled_fsdp.buckets.transport import WAIT
from compiled_fsdp.passes.graph import (
    ENCODES,
    IS_SHARD,
    ancestors,
    argument,
    calls,
    is_deferred_reduction,
    is_gather,
    is_planned,
    kind_of,
    ops,
    planned_collectives,
    returns_several,
    waits_of,
)
from compiled_fsdp.passes.memory import peak_bytes
from compiled_fsdp.passes.plan.search import OverBudget
from compiled_fsdp.passes.views import written_by

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext
    from compiled_fsdp.passes.plan.tasks import Tasks


class GraphIsWrong(CompiledFsdpError, RuntimeError):
    """A pass made a wrong graph. Please report it, with the output of TORCH_LOGS="+compiled_fsdp"."""


def verify(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Check the lowered graph, and change nothing in it.

    Raises:
        GraphIsWrong: the graph has a collective that the plan does not have, or in another order; one of the model's
            own collectives is not where it was when the graph was planned; the result of a collective, or the memory
            that it writes, is used before its wait; a parameter is written, or its gradient is published, before it is
            gathered.
        OverBudget: the lowered graph holds more than the budget.
    """
    if ctx.verify_level == "off":
        ctx.changed("verify", "off")
        return gm
    check_graph(gm, after="lower")
    launches = planned_collectives(gm)
    decided = ctx.planned
    if decided is not None and not ctx.disabled_passes & {"bucket", "schedule", "lower"}:
        launched = [
            ("gather" if is_gather(n) else "reduce", read) for n in launches for read in n.meta.get("reads", ())
        ]
        planned = [(bucket.kind, read) for bucket in decided.plan.launches for read in bucket.reads]
        if launched != planned or any("reads" not in n.meta for n in launches):
            raise GraphIsWrong(
                f"compiled_fsdp: the lowered {ctx.phase} graph launches {launched}, planned were {planned}."
            )
    if decided is not None and decided.tasks is not None:
        _check_models_own(gm, ctx, decided.tasks)
    if ctx.rules.budget is not None and decided is not None and decided.tasks is not None:
        shards = {i for launch in launches if is_gather(launch) for i in _inputs_of(launch)}
        shards |= {node for node in gm.graph.nodes if IS_SHARD in node.meta}
        names = frozenset(node.name for node in shards)
        peak = decided.tasks.persistent + peak_bytes(gm, backward=ctx.phase == "backward", shards=names)
        if peak > ctx.rules.budget:
            raise OverBudget(
                f"compiled_fsdp: option 'memory_budget': the rewritten {ctx.phase} graph holds {peak:,} bytes, but the "
                f"budget is {ctx.rules.budget:,.0f} bytes. Please report it; a budget of {peak:,} bytes would do.",
                peak,
            )
    ctx.changed("verify", f"{len(launches)} collectives as planned")
    return gm


def _check_models_own(gm: GraphModule, ctx: PassContext, tasks: Tasks) -> None:
    """Raise GraphIsWrong if the model's own collectives are not where they were planned, among compiled_fsdp's."""
    found, buckets = [], set()
    for node in gm.graph.nodes:
        if node.meta.get("bucket") is not None and is_planned(node):
            buckets.add(node.meta["bucket"])
        elif kind_of(node) is not None and not node.meta.get("of_bucket") and ENCODES not in node.meta:
            found.append((kind_of(node), len(buckets)))
    schedule = ctx.planned.schedule if ctx.planned is not None else ()
    planned = [(of.kind, sum(launch.at <= of.at for launch in schedule)) for of in tasks.model_collectives]
    if ctx.disabled_passes & {"bucket", "schedule", "lower"}:
        found, planned = [(kind, 0) for kind, _ in found], [(kind, 0) for kind, _ in planned]
    if found != planned:
        raise GraphIsWrong(
            f"compiled_fsdp: the model's own collectives in the lowered {ctx.phase} graph, each with the number of "
            f"ours before it, are {found}, planned were {planned}."
        )


def check_graph(gm: GraphModule, after: str) -> None:
    """Check the invariants of any rewritten graph.

    It lints; each launch has one wait, and each copy to host memory or back; a parameter is gathered before it is
    written and before its gradient is published.

    Raises:
        GraphIsWrong: the pass ``after`` has broken one of them.
    """
    gm.graph.lint()
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    launches = planned_collectives(gm)
    for launch in launches:
        if is_deferred_reduction(launch):
            continue
        for result in list(launch.users) if returns_several(launch) else [launch]:
            if [user.target for user in result.users] != [WAIT]:
                raise GraphIsWrong(
                    f"compiled_fsdp: after {after}: {result} is used by {list(result.users)}, not by one wait."
                )
        out = launch.kwargs.get("out")
        if isinstance(out, Node) and list(out.users) != [launch]:
            raise GraphIsWrong(
                f"compiled_fsdp: after {after}: {out}, which {launch} writes, is used by {list(out.users)} before the "
                "wait."
            )
    for start in calls(gm, *host_copies.KINDS):
        if [(user.target, user.args) for user in start.users] != [(host_copies.WAIT_COPY, (start, start.args[0]))]:
            raise GraphIsWrong(
                f"compiled_fsdp: after {after}: {start} is used by {list(start.users)}, not by one wait with its "
                "source."
            )
    for publish in calls(gm, ops.accumulate_grad.default):
        of_parameter = [n for n in launches if is_gather(n) and argument(publish, "read") in n.meta.get("reads", ())]
        for launch in of_parameter:
            if any(order[wait] > order[publish] for wait in waits_of(launch)):
                raise GraphIsWrong(
                    f"compiled_fsdp: after {after}: {publish} hands out a gradient, with which the parameter may be "
                    f"updated, before {launch} has gathered it."
                )
    written: dict[Node, list[Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        for source in written_by(node):
            written[source].append(node)
    for launch in launches:
        if is_gather(launch):
            for source in _inputs_of(launch):
                for write in written.get(source, ()):
                    if order[write] < order[launch]:
                        raise GraphIsWrong(
                            f"compiled_fsdp: after {after}: {write} writes {source} before {launch} gathers it."
                        )


def _inputs_of(node: Node) -> set[Node]:
    return {source for source in ancestors([node]) if source.op == "placeholder"}
