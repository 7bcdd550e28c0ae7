"""Random joint graphs: a forward that reads parameters, and what autograd makes of it, traced as AOTAutograd does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import compiled_fsdp.ops.autograd  # noqa: F401  registers the backward of a read
from compiled_fsdp.buckets.reduction import GradSync
from compiled_fsdp.passes.graph import ops
from tests.passes.regions import Region, regions

LENGTH = 3
"""Numbers of each value."""


@dataclass(frozen=True)
class Joint:
    """A training step of a random model. Its steps take and leave a list of vectors, at first the input alone:

    ("compute", a, b)   a new value from two others
    ("times", a, b)     likewise, which saves both for backward
    ("drop", a)         some elements of another value, which saves which ones for backward
    ("scale", i, a)     a new value from parameter i and another
    ("apply", i, a)     likewise, which saves as much as the parameter has
    ("merge", i, j, a)  a new value from what two parameters alone give, and another
    """

    # Parameters and meshes; it has no steps.
    region: Region
    steps: tuple[tuple[Any, ...], ...]
    # Parameters without gradients.
    frozen: frozenset[int] = frozenset()

    @property
    def trained(self) -> list[int]:
        return [i for i in range(len(self.region.params)) if i not in self.frozen]

    def graph(self) -> GraphModule:
        """Inputs: shards, ids, gates, the input, the gradient of the output. Results: the output, gradients of the
        gates that are used, and of the input."""
        params = self.region.params
        with FakeTensorMode():
            shards = [torch.empty(p.shard_size, dtype=p.shard_dtype) for p in params]
            ids = [torch.zeros(1, dtype=torch.int64) for _ in params]
            gates = [torch.empty_like(shards[i], requires_grad=True) for i in self.trained]
            x = torch.empty(LENGTH, requires_grad=True)
            primals = [*shards, *ids, *gates, x]
            gm = make_fx(lambda *of: self._step(*of))(primals, torch.empty(LENGTH))
        gm.graph.eliminate_dead_code()
        inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
        for i, node in enumerate(inputs):
            node._rename(f"primals_{i}" if i < len(primals) else "tangents_0")
            node.target = node.name  # by which the partitioner tells them apart
        gm.recompile()
        return gm

    def _step(self, primals: list[Tensor], tangent: Tensor) -> list[Tensor]:
        count = len(self.region.params)
        shards, ids, gates, x = primals[:count], primals[count : 2 * count], primals[2 * count : -1], primals[-1]
        out = self._forward(shards, ids, dict(zip(self.trained, gates, strict=True)), x)
        grads = torch.autograd.grad([out], [*gates, x], [tangent], allow_unused=True)
        return [out, *(grad for grad in grads if grad is not None)]

    def _forward(self, shards: list[Tensor], ids: list[Tensor], gates: dict[int, Tensor], x: Tensor) -> Tensor:
        def full(i: int) -> Tensor:
            p = self.region.params[i]
            return ops.unshard(shards[i], gates.get(i), ids[i], str(p.read_spec), p.keep, 0, i).float()

        values = [x]
        for kind, *of in self.steps:
            at = values[of[-1] % len(values)]
            if kind == "compute":
                values.append(torch.tanh(at + 2 * values[of[0] % len(values)]))
            elif kind == "times":
                values.append(at * values[of[0] % len(values)])
            elif kind == "drop":
                values.append(at * torch.ops.aten.bernoulli.p(at.detach(), 0.5))
            elif kind == "scale":
                values.append(at * full(of[0]).flatten().sum().sin())
            elif kind == "apply":
                values.append(at + torch.tanh(full(of[0]).flatten() * at.sum()).sum())
            else:
                merged = full(of[0]).flatten().sum() * full(of[1]).flatten().abs().sum()
                values.append(at * merged.cos())
        return values[-1] + x  # something that is not the input


@st.composite
def joints(draw: Any) -> Joint:
    region = draw(regions())
    params = tuple(replace(p, spec=replace(p.spec, sync=GradSync.ALL)) for p in region.params)
    param, value = st.integers(0, len(params) - 1), st.integers(0, 30)
    step = st.one_of(
        st.tuples(st.just("compute"), value, value),
        st.tuples(st.just("times"), value, value),
        st.tuples(st.just("drop"), value),
        st.tuples(st.just("scale"), param, value),
        st.tuples(st.just("apply"), param, value),
        st.tuples(st.just("merge"), param, param, value),
    )
    steps = tuple(draw(st.lists(step, min_size=1, max_size=8)))
    frozen = draw(st.sets(param, max_size=2))
    return Joint(replace(region, params=params, steps=()), steps, frozenset(frozen))
