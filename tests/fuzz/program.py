"""A training program as plain data: `generate.py` draws it, `source.py` writes it as Python, `shrink.py` shrinks it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass

from compiled_fsdp.base.plain_data import from_json as value_from_json

WIDTH = 8
LENGTH = 4
"""A layer takes and returns [batch, LENGTH, WIDTH]."""

MODES = (
    "eager", "torch's aot_eager", "aot_eager", "inductor", "per block", "broken", "compiled autograd", "dynamic",
)  # fmt: skip
"""How the model runs: uncompiled; compiled by torch's own backend; compiled as a whole by compiled_fsdp, with codegen
"aot_eager" or "inductor"; each layer compiled alone; with graph breaks between the layers; with such graph breaks, and
the backward as one graph; with symbolic sizes."""


OTHERS = {
    "checkpointed": "x = checkpoint({m}, x, use_reentrant=False)",
    "not checkpointed": "x = {m}(x)",
    "breaks": "torch._dynamo.graph_break()\nx = {m}(x)",
    "breaks behind": "x = {m}(x)\ntorch._dynamo.graph_break()",
    "logs": "x = {m}(x)\nself.seen = x.detach().norm(), [p.detach().sum() for p in {m}.parameters()]",
    "tells": "x = {m}(x)\nif x.detach().float().norm().item() > 1e9:\n    x = x + 1",
    "zeros": "x = x + 0.0 * {m}(torch.zeros_like(x[:1])).sum()",
    "ones": "x = x + {m}(torch.ones_like(x))",
    "first row": "x = x + {m}(x[:1])",
    "scaled": "x = x + 0.5 * {m}(x)",
    "detached": "x = x + {m}(x.detach())",
    "cast": "x = {m}(x.double().to(x.dtype))",
    "in two": "x = {m}(x)\nx = x + x.mean()",
}
"""By name: the code that one rank runs instead of calling the layer `{m}`, with the same parameters, as if its data had
led it to another branch."""


@dataclass(frozen=True)
class Layer:
    """One layer of the model.

    Attributes:
        kind: a name of `layers.KINDS`.
        hidden: an inner size.
        unit: whether `fully_shard` is called on it.
        checkpoint: "", "plain" or "reentrant": the kind of activation checkpoint around it.
        frozen: "", "all", or "first": its first parameter.
        dtype: "", or the name of the dtype that its parameters are cast to, and in which it computes.
        inner: layers that run one after another before its own computation.
    """

    kind: str = "mlp"
    hidden: int = 8
    unit: bool = False
    checkpoint: str = ""
    frozen: str = ""
    dtype: str = ""
    inner: tuple[Layer, ...] = ()


@dataclass(frozen=True)
class Step:
    """One step of the training loop.

    Attributes:
        kind: "train", "evaluate", "inference", "save" (keep a copy of the states), "load" (load the last copy),
            "checkpoint" (save by DCP, and load).
        sizes: batch sizes by rank, also for ranks that the program does not have.
        before: a line of code that runs first: a toggle.
        microbatches: the number of backwards before the optimizer's step.
        sync: the microbatches that reduce: "last", "each", or (HSDP) "shards": each over the shards, and only the last
            one over the replicas, too; or (four shards) "node": each over two ranks, which keep a working copy, and
            only the last one over the others, too.
        forwards: the number of forwards before each backward. Their losses are added up.
        losses: the use of a second output: "" (the loss does not use it), "sum" (it is added to the loss), "two" (it
            has a backward of its own, after the first), "together" (both in one call of `torch.autograd.backward`).
        clip: whether gradients are clipped.
        fails: "", or an incomplete pass that comes first: "forward" or "backward" (an exception is raised there and
            caught), or "loss" (a forward without a backward).
        zero: whether gradients are zeroed instead of set to None.
        again: whether each backward is run twice, the first time with `retain_graph=True`.
        preview: whether `explain` plans the call first, which must leave nothing behind.
        own: whether `torch.autograd.grad` computes the loss's gradient in the head before the backward.
        odd: the rank that takes the program's `other` way; -1 for none.
    """

    kind: str = "train"
    sizes: tuple[int, ...] = (2, 2, 2, 2)
    before: str = ""
    microbatches: int = 1
    sync: str = "last"
    forwards: int = 1
    losses: str = ""
    clip: bool = False
    fails: str = ""
    zero: bool = False
    again: bool = False
    preview: bool = False
    own: bool = False
    odd: int = -1


@dataclass(frozen=True)
class Program:
    """A model, how it is sharded and run, and a script of steps.

    Attributes:
        seed: the seed that it was drawn from.
        mode: one of MODES.
        world: the number of ranks.
        mesh: "1-D", "HSDP 2" (two replicas), "HSDP all" (every rank is a replica), "HSDP none" (one replica), "TP"
            (2 x 2), or "replicate": 1-D, with `replicate` instead of `fully_shard`.
        layers: the model's layers, each held once.
        calls: the layers' numbers in the order in which forward calls them.
        tokens: whether inputs are tokens, which an embedding takes.
        head: "", "linear", or "tied": to the embedding.
        output: "tensor", "dict", "tuple", or two tensors: "beside" (the second is computed from the first, like a loss
            from logits) or "middle" (the second is the input of the model's second half).
        writes: whether forward writes to the shards of units that come later.
        policy: the arguments of `MixedPrecisionPolicy`, as code.
        root_policy: the root's arguments, if it has another policy.
        reshard: `reshard_after_forward` as code.
        columns: whether weights are sharded on their last dimension if the number of ranks divides it.
        offload: whether shards are in host memory.
        grouped: whether the first two layers form one unit.
        sharding: further calls on the sharded model, as code.
        options: the backend's options: name and code.
        optimizer: code that makes the optimizer of `params`.
        on_shards: whether the optimizer steps as in a `TrainStep`.
        compiles_update: whether such a step is compiled code.
        in_backward: whether optimizers step in post-accumulate-grad hooks.
        other: the way that one rank takes in some steps when the other ranks call a layer: a name of `OTHERS`, or "".
        other_at: the position of that call in `calls`.
        steps: the script.
    """

    seed: int = 0
    mode: str = "eager"
    world: int = 2
    mesh: str = "1-D"
    layers: tuple[Layer, ...] = (Layer(),)
    calls: tuple[int, ...] = (0,)
    tokens: bool = False
    head: str = ""
    output: str = "tensor"
    writes: bool = False
    policy: str = ""
    root_policy: str = ""
    reshard: str = "None"
    columns: bool = False
    offload: bool = False
    grouped: bool = False
    sharding: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    optimizer: str = "torch.optim.SGD(params, lr=0.1)"
    on_shards: bool = False
    compiles_update: bool = False
    in_backward: bool = False
    other: str = ""
    other_at: int = 0
    steps: tuple[Step, ...] = (Step(),)

    def every_layer(self, *of: Layer) -> Iterator[Layer]:
        """Yield these layers (none given: all), inner ones too."""
        stack = list(of or self.layers)
        while stack:
            layer = stack.pop()
            stack += layer.inner
            yield layer


def to_json(program: Program) -> str:
    """Return the program as one line of JSON."""
    return json.dumps(dataclasses.asdict(program))


def from_json(text: str) -> Program:
    """Return the program that `to_json` has written."""
    return value_from_json(Program, text)
