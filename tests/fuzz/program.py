"""A training program as plain data: what `generate.py` draws, `source.py` writes as Python, and `shrink.py` cuts."""

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
"""How the model runs: uncompiled; under a backend of torch's own; whole, by our backend, with either codegen; each
layer compiled alone; with graph breaks between the layers; these, and the backward as one graph; with symbolic
sizes."""


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
"""What a rank does that has other data than the rest, with the same parameters; `{m}` is a layer."""


@dataclass(frozen=True)
class Layer:
    """One layer of the model.

    Attributes:
        kind: a name of `layers.KINDS`.
        hidden: an inner size.
        unit: whether `fully_shard` is called on it.
        checkpoint: "", "plain" or "reentrant": whether it is recomputed.
        frozen: "", "all", or "first": its first parameter.
        dtype: "" or the name of what its parameters are cast to, and it computes in.
        inner: layers that run before its own computation, in a `Sequential`.
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
        sizes: batch sizes by rank; of ranks that the program does not have, too.
        before: a line of code that runs first: a toggle.
        microbatches: backwards before the optimizer's step.
        sync: which of them reduce: "last", "each", or "shards": all, the others over the shards alone (HSDP).
        forwards: forwards before each backward, whose losses are added up.
        losses: what becomes of a second output: "" (the loss does not use it), "sum" (it is added to the loss), "two"
            (a backward of its own, after the other one), "together" (both in one call of `torch.autograd.backward`).
        clip: whether gradients are clipped.
        fails: "", or where an exception is raised and caught first: "forward", "loss" (no backward), "backward".
        zero: whether gradients are zeroed and not set to None.
        again: whether each backward is run twice, the first time with `retain_graph=True`.
        preview: whether `explain` plans the call first, which must leave nothing behind.
        own: whether the loss is asked first for its gradient in the head, by `torch.autograd.grad`.
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
        seed: what it was drawn from.
        mode: one of MODES.
        world: the number of ranks.
        mesh: "1-D", "HSDP 2" (two replicas), "HSDP all" (every rank is a replica) or "TP" (2 x 2).
        layers: the model's, each held once.
        calls: their numbers in the order in which forward calls them.
        tokens: whether inputs are tokens, which an embedding takes.
        head: "", "linear", or "tied": to the embedding.
        output: "tensor", "dict", "tuple", or of two tensors "beside" (the other one is computed of the first, as a loss
            is of logits) or "middle" (the other one is what the model's second half is given).
        writes: whether forward writes to the shards of units that come later.
        policy: `MixedPrecisionPolicy`'s arguments as code.
        root_policy: the root's, if it has another one.
        reshard: `reshard_after_forward` as code.
        columns: whether weights are sharded over their last dimension where it divides evenly.
        offload: whether shards are in host memory.
        grouped: whether the first two layers form one unit.
        sharding: further calls on the sharded model, as code.
        options: the backend's, as code by name.
        optimizer: as code, of `params`.
        in_backward: whether it steps in post-accumulate-grad hooks.
        other: what one rank does in some steps where others call a layer: a name of `OTHERS`, or "".
        other_at: which call that is, by its place in `calls`.
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
    in_backward: bool = False
    other: str = ""
    other_at: int = 0
    steps: tuple[Step, ...] = (Step(),)

    def every_layer(self) -> Iterator[Layer]:
        """All layers, inner ones too."""
        stack = list(self.layers)
        while stack:
            layer = stack.pop()
            stack += layer.inner
            yield layer


def to_json(program: Program) -> str:
    """A program as one line."""
    return json.dumps(dataclasses.asdict(program))


def from_json(text: str) -> Program:
    """The program of `to_json`."""
    return value_from_json(Program, text)
