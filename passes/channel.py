"""The costs of a mesh's collectives: which transport sends them, its cost curve, and the stream on which they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.buckets.spec import Kind
from compiled_fsdp.buckets.transport import BY_COPY_ENGINES, TRANSPORTS, reduces_again_by, reduces_by
from compiled_fsdp.passes.cost.hardware import Curve
from compiled_fsdp.passes.plan.channels import CommChannel

if TYPE_CHECKING:
    from compiled_fsdp.passes.context import PassContext


def channel_of(
    ctx: PassContext, gathered: bool, world: int, group_id: int, replicas: int = 1, *, encodes: bool = False,
    in_parts: bool = False,
) -> CommChannel:  # fmt: skip
    """The cost of the collectives of a group.

    Reductions are all-to-alls if gradients are encoded, or if the backend allows it and it is quicker. Their cost
    includes the second reduction, over ``replicas`` ranks: the all-reduce of each shard, or with ``in_parts`` another
    reduction to shards. If there is one shard only, the all-reduce is all.
    """
    groups, kind = ctx.groups[group_id], Kind.GATHER if gathered else Kind.REDUCE
    name = _transport(ctx, kind, world, groups.nodes, encodes=encodes)
    name = name if gathered else reduces_by(name, world, over_replicas=replicas > 1)
    transport = TRANSPORTS[name]
    sent = ctx.hardware.sent(transport.curve, world, groups.nodes)
    if name == "all_reduce":
        curve = ctx.hardware.curve(transport.curve, replicas, groups.replicate_nodes)
        sent = ctx.hardware.sent(transport.curve, replicas, groups.replicate_nodes)
    elif transport.copy_engines:
        curve = ctx.hardware.curve_by_copies(transport.curve, world)
    else:
        curve = ctx.hardware.curve(transport.curve, world, groups.nodes)
    if replicas > 1 and name != "all_reduce":
        second = TRANSPORTS[reduces_again_by(name, in_parts=in_parts)].curve
        curve = _one_after_the_other(curve, ctx.hardware.curve(second, replicas, groups.replicate_nodes), world)
        more = ctx.hardware.sent(second, replicas, groups.replicate_nodes)
        sent = sent[0] + more[0] / world, sent[1] + more[1] / world
    of_reductions = not gathered and groups.has_reduce_scatter_group
    # torch runs all collectives by copy engines on one stream
    stream = stream_of(min(ctx.groups), False) if transport.copy_engines else stream_of(group_id, of_reductions)
    return CommChannel(
        curve.latency,
        curve.each,
        curve.bytes_per_second,
        world,
        stream,
        received_share=float(transport.leaves_pieces),
        transport="" if name == kind.usual_transport else name,
        quick=curve.quick,
        by_copies=transport.copy_engines and replicas == 1,
        sent=sent,
        parts=replicas if in_parts else 1,
        group_id=group_id,
    )


def link_of(ctx: PassContext, world: int, group_id: int, replicas: int) -> str:
    """The wires that limit a group's collectives, as ``Hardware.link`` names them; arguments as for ``channel_of``."""
    groups = ctx.groups[group_id]
    if world == 1 and replicas > 1:
        return ctx.hardware.link(replicas, groups.replicate_nodes)
    return ctx.hardware.link(world, groups.nodes)


def _one_after_the_other(reduces: Curve, again: Curve, world: int) -> Curve:
    """The cost of a reduction followed by a second one of each of its ``world`` shards."""

    def together(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
        return one[0] + other[0], 1 / (1 / one[1] + 1 / other[1] / world)

    usual = [(curve.latency, curve.bytes_per_second) for curve in (reduces, again)]
    quick = None
    if reduces.quick is not None and again.quick is not None:
        quick = together(reduces.quick, again.quick)
    return Curve(*together(*usual), reduces.each, quick)


def _transport(ctx: PassContext, kind: Kind, world: int, nodes: int | None, *, encodes: bool) -> str:
    if ctx.transport == "symm_mem" and (kind is Kind.GATHER or not encodes):
        return BY_COPY_ENGINES[kind]
    if kind is Kind.GATHER:
        return kind.usual_transport
    rates = {
        name: ctx.hardware.curve(TRANSPORTS[name].curve, world, nodes).bytes_per_second
        for name in ("all_to_all", "reduce_scatter")
    }
    quicker = ctx.may_use_all_to_all and rates["all_to_all"] > rates["reduce_scatter"]
    return "all_to_all" if encodes or quicker else "reduce_scatter"


def stream_of(group_id: int, of_reductions: bool) -> int:
    """The number of a stream of collectives: ``group_id``, or ``-1 - group_id`` if reductions have their own group."""
    return -1 - group_id if of_reductions else group_id
