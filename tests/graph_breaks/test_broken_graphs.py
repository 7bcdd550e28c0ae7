"""Graph breaks between units and inside of them: results, and the lines that explain them."""

import pytest
import torch
import torch.nn as nn
import torch.utils.checkpoint
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from compiled_fsdp import explain, fully_shard
from tests.harness import Transformer, assert_same, compiled, distributed, fsdp2, fsdp2_record, shard, train
from tests.harness.models import loss_of_two, small, without_attention


@distributed(world_size=2)
def test_graph_breaks(rank, world_size):
    """Results stay right, and explain names the lines: of a break between compiled pieces, and of one inside a loop."""

    class Breaking(Transformer):
        def forward(self, tokens):
            x = self.embedding(tokens)
            torch._dynamo.graph_break()  # between
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    class Looping(Transformer):
        def forward(self, tokens):
            x = self.embedding(tokens)
            for block in self.blocks:
                torch._dynamo.graph_break()  # inside
                x = block(x)
            return self.head(self.norm(x))

    for cls, word in ((Breaking, "# between"), (Looping, "# inside")):
        model = shard(small(blocks=2, cls=cls), fully_shard)
        assert_same(train(compiled(model), steps=2), fsdp2_record(small(blocks=2, cls=cls), steps=2))
        breaks = explain(model).graph_breaks
        assert any(word in where and __file__ in where for _, where in breaks), breaks


class GivenUp(nn.Module):
    """Dynamo gives up on the whole forward, because of the break in its loop; the parameters are read right there."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding, self.layer, self.head = nn.Embedding(61, 8), nn.Linear(8, 8), nn.Linear(8, 61)

    def forward(self, tokens):
        x = torch.nn.functional.embedding(tokens, self.embedding.weight)
        for _ in range(2):
            torch._dynamo.graph_break()
            x = torch.tanh(x @ self.layer.weight + self.layer.bias)
        return x @ self.head.weight.t()


@distributed(world_size=2)
def test_reads_in_code_that_does_not_compile(rank, world_size):
    """They run as they are: Dynamo does not compile what a gather or a reduction consists of."""
    targets: set[str] = set()

    def backend(gm, inputs):
        targets.update(str(node.target) for node in gm.graph.nodes)
        return gm.forward

    expected = train(torch_fully_shard(GivenUp()))
    assert_same(train(compiled(fully_shard(GivenUp()))), expected)
    assert_same(train(torch.compile(fully_shard(GivenUp()), backend=backend)), expected)
    assert not [target for target in targets if "c10d" in target]


class Breaking(Transformer):
    """A graph break before each block, after the last one, or both, of several kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__(dim=16, blocks=3)
        self.kind = kind
        without_attention(self)

    def step_aside(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "graph_break":
            torch._dynamo.graph_break()
        elif self.kind == "item" and x.detach().abs().max().item() > 1e9:
            x = x / 2
        elif self.kind == "disabled":
            x = aside(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(self.step_aside(x))
        return self.head(self.norm(self.step_aside(x)))


@torch.compiler.disable
def aside(x: torch.Tensor) -> torch.Tensor:
    return x * 1


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("kind", "reshard_after_forward"),
    [("graph_break", True), ("graph_break", False), ("item", None), ("disabled", None)],
)
def test_breaks_between_units(rank, world_size, kind, reshard_after_forward):
    """The results, and that each break has its line. Of equal blocks at most two graphs each way are compiled."""
    options = {"reshard_after_forward": reshard_after_forward}
    model = shard(Breaking(kind), fully_shard, **options)
    assert_same(train(compiled(model), steps=2), fsdp2_record(Breaking(kind), **options, steps=2))
    explanation = explain(model)
    assert explanation.graph_breaks
    assert all(__file__ in where for _, where in explanation.graph_breaks)
    of_blocks = [g for g in explanation.graphs if any("down" in read.name for read in g.reads)]
    assert 2 <= len(of_blocks) <= 4, str(explanation)


@distributed(world_size=2)
def test_two_forwards_of_broken_graphs_and_one_backward(rank, world_size):
    """Each forward's gradients are reduced, then added; FSDP2 adds first, so rounding differs."""

    def step(model, index):
        loss = loss_of_two(model, rank, index)
        loss.backward()
        return loss.detach()

    def sgd(model):  # AdamW makes much of the rounding of a gradient that is nearly zero
        return torch.optim.SGD(model.parameters(), lr=0.1)

    model, reference = shard(Breaking("graph_break"), fully_shard), fsdp2(Breaking("graph_break"))
    expected = train(reference, step, steps=2, optimizer=sgd(reference))
    assert_same(train(compiled(model), step, steps=2, optimizer=sgd(model)), expected, rtol=1e-5)
    assert explain(model).graph_breaks


@pytest.mark.more
@distributed(world_size=2)
def test_a_block_that_does_not_compile(rank, world_size):
    """The compiler is off for one of three."""

    class Disabled(Transformer):
        def forward(self, tokens):
            x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
            x = torch.compiler.disable(self.blocks[1])(self.blocks[0](x))
            return self.head(self.norm(self.blocks[2](x)))

    model = shard(small(blocks=3, cls=Disabled), fully_shard)
    assert_same(train(compiled(model), steps=2), fsdp2_record(small(blocks=3, cls=Disabled), steps=2))
    assert {read.name.split(".")[1] for g in explain(model).graphs for read in g.reads if "block" in read.name} == {
        "0",
        "2",
    }
