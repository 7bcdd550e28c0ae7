"""Ranks that run a region's graph in step, in one process, and see what must not be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, map_arg

from compiled_fsdp.buckets import host_copies
from compiled_fsdp.buckets.collectives import by_rank, unpack_gather
from compiled_fsdp.buckets.reduction import GradSync
from compiled_fsdp.buckets.spec import ReadSpec
from compiled_fsdp.buckets.transport import (
    ALL_GATHER,
    ALL_GATHER_COALESCED,
    ALL_GATHER_OUT,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    WAIT,
)
from compiled_fsdp.passes.graph import argument, ops, spec_of
from tests.passes.graphs import ALL_REDUCE
from tests.passes.regions import Region


@dataclass
class Flight:
    """What a launch returns on a rank: nothing but its one wait can use it, and nobody may write to what it sends."""

    tensor: Tensor
    sent: Tensor
    as_sent: Tensor


@dataclass
class Ranks:
    """Runs a region's graph, lowered or not, on all of its ranks in step.

    Attributes:
        launches: ours, in order: the kind, and the name of the group.
        deferred: by read, each rank's gradients that were in flight at the end.
        published: by read, each rank's gradients that were handed out. The parameter's shard is written to at once, as
            an optimizer in backward would.
    """

    region: Region
    launches: list[tuple[str, str]] = field(default_factory=list)
    deferred: dict[int, list[Tensor]] = field(default_factory=dict)
    published: dict[int, list[Tensor]] = field(default_factory=dict)
    flying: Counter[int] = field(default_factory=Counter)

    def run(self, gm: GraphModule, inputs: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """The outputs of each rank."""
        envs: list[dict[Node, Any]] = [{} for _ in inputs]
        feeds = [iter(given) for given in inputs]
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                results: list[Any] = [next(feed) for feed in feeds]
            else:
                args = [map_arg((node.args, node.kwargs), env.__getitem__) for env in envs]
                if node.op == "output":
                    assert not self.flying.total(), "something was never waited for"
                    return [list(of[0]) for of, _ in args]
                results = self._call(node, args, inputs)
            for env, result in zip(envs, results, strict=True):
                env[node] = result
        raise AssertionError("no output")

    def _call(self, node: Node, args: list[Any], inputs: Sequence[Sequence[Tensor]]) -> list[Any]:
        target, given = node.target, [of for of, _ in args]
        if target in (ALL_GATHER, ALL_GATHER_OUT):
            return self._launch(node, "gather", [of[0] for of in given], given[0][2], given[0][1])
        if target is ALL_GATHER_COALESCED:
            group, world = given[0][2], given[0][1]
            each = [
                self._launch(node, "gather", list(of), group, world)
                for of in zip(*(of[0] for of in given), strict=True)
            ]
            return [list(of) for of in zip(*each, strict=True)]
        if target is REDUCE_SCATTER:
            return self._launch(node, "reduce", [of[0] for of in given], given[0][3], given[0][2], given[0][1])
        if target is ALL_TO_ALL:
            return self._launch(node, "exchange", [of[0] for of in given], given[0][3])
        if target is ALL_REDUCE:
            return self._launch(node, "sum", [of[0] for of in given], given[0][2], op=given[0][1])
        if target in host_copies.KINDS:
            flights = [Flight(of[0].clone(), of[0], of[0].clone()) for of in given]
            self.flying.update(map(id, flights))
            return flights
        if target in (WAIT, host_copies.WAIT_COPY):
            return [self._landed(node, of[0]) for of in given]
        if target is ops.unshard.default:
            return self._unshard(argument(node, "read"), [of[0] for of in given])
        if target is ops.reduce_grad.default:
            return self._reduce(argument(node, "read"), [of[0] for of in given])
        if target is ops.retain.default:
            return [of[0] for of in given]
        if target is ops.accumulate_grad.default:
            read = argument(node, "read")
            assert read not in self.published, "published twice"
            self.published[read] = [of[1].clone() for of in given]
            for shards in inputs:
                shards[read].add_(100)
            return [torch.zeros(()) for _ in given]
        if target is ops.launch.default:
            return self._crossing(node, [of[0] for of in given])
        return [target(*of, **named) for of, named in args]

    def _crossing(self, node: Node, tensors: list[list[Tensor]]) -> list[Any]:
        """A launch at an edge of the graph, of each rank's ``tensors``."""
        spec = spec_of(node)
        groups = self.region.groups[spec.group_id]
        if spec.kind.supplies:
            sent = [[shard.to(spec.dtype).flatten() for shard in of] for of in tensors]
            buckets = sent if spec.coalesced else [[torch.cat(of)] for of in sent]
            each = [self._launch(node, "gather", list(of), groups.all_gather) for of in zip(*buckets, strict=True)]
            return [list(of) for of in zip(*each, strict=True)]
        kind, group = ("sum", groups.replicate) if spec.transport == "all_reduce" else ("reduce", groups.reduce_scatter)
        self.launches += [(kind, group)] * (len(spec.reads) if spec.coalesced else 1)
        for i, read in enumerate(spec.reads):
            assert read not in self.deferred, "deferred twice"
            self.deferred[read] = self._reduce(read, [of[i] for of in tensors])
        return [[torch.zeros((), dtype=spec.dtype)] for _ in tensors]

    def _launch(
        self, node: Node, kind: str, sent: list[Tensor], group: str, world: int | None = None, op: str = "sum"
    ) -> list[Flight]:
        members = self.region.members(group)
        assert world in (None, len(members[0])), f"{node}: {world} ranks of {group}"
        if node.meta.get("of_bucket"):
            self._check_link(node, kind, group)
            self.launches += [("reduce" if kind == "exchange" else kind, group)]
        flights = []
        for result, tensor in zip(_collective(kind, sent, members, op), sent, strict=True):
            flights.append(Flight(result, tensor, tensor.clone()))
            self.flying[id(flights[-1])] += 1
        return flights

    def _check_link(self, node: Node, kind: str, group: str) -> None:
        """What a bucket has of parameters is communicated in their mesh's group, and in no other of as many ranks."""
        for read in node.meta.get("reads", ()):
            param = self.region.params[read]
            groups = param.reduces_in
            over_replicas = groups.all_gather == "" and kind == "sum"
            reduces = groups.replicate if over_replicas else groups.reduce_scatter
            assert group == (param.mesh.groups.all_gather if kind == "gather" else reduces), (node, group)

    def _landed(self, node: Node, flight: Any) -> Tensor:
        assert isinstance(flight, Flight), f"{node} waits for no launch"
        assert self.flying.pop(id(flight), 0) == 1, f"{node} waits a second time"
        assert torch.equal(flight.sent, flight.as_sent), f"before {node} something wrote to what is sent"
        return flight.tensor

    # ---- what reads and reductions are, in so many words
    def _unshard(self, read: int, shards: list[Tensor]) -> list[Tensor]:
        p = self.region.params[read]
        sent = [shard.to(p.dtype).flatten() for shard in shards]
        gathered = _collective("gather", sent, self.region.members(p.mesh.groups.all_gather), "sum")
        spec = ReadSpec(p.size, p.mesh.shards, dim=p.dim, dtype=p.dtype)
        return [unpack_gather(of, 0, spec).clone() for of in gathered]

    def _reduce(self, read: int, grads: list[Tensor]) -> list[Tensor]:
        p = self.region.params[read]
        spec, groups, dtype = p.reduction_spec, p.reduces_in, getattr(torch, p.spec.dtype)
        numel = math.prod(spec.shard_size)
        sent = [by_rank(grad.to(dtype), numel, spec.world, spec.dim).flatten() / p.spec.before for grad in grads]
        found = _collective("reduce", sent, self.region.members(groups.reduce_scatter), p.spec.op)
        whole = p.spec.sync is GradSync.ALL
        if groups.replicate is not None and whole:
            kind = "sum" if p.spec.within is None else "reduce"
            found = _collective(kind, found, self.region.members(groups.replicate), p.spec.op)
        return [(of / p.spec.after if whole else of).to(p.shard_dtype).view(spec.reduced_size) for of in found]


def _collective(kind: str, sent: list[Tensor], members: list[list[int]], op: str) -> list[Tensor]:
    """What each rank has of a collective; ``members``: the ranks of each group."""
    found: list[Tensor] = [torch.empty(0)] * len(sent)
    for ranks in members:
        of = [sent[rank] for rank in ranks]
        total = torch.stack(of).sum(0) / (len(of) if op == "avg" else 1)
        pieces = {
            "gather": lambda of=of: [torch.cat(of)] * len(of),
            "sum": lambda of=of, total=total: [total] * len(of),
            "reduce": lambda of=of, total=total: total.chunk(len(of)),
            "exchange": lambda of=of: [torch.cat(to) for to in zip(*(t.chunk(len(of)) for t in of), strict=True)],
        }[kind]()
        for rank, piece in zip(ranks, pieces, strict=True):
            found[rank] = piece.clone()
    return found
