"""What `explain` says of what was compiled: graph breaks wherever Dynamo ends a piece, layers that share a graph, other
backends; and the arguments that it takes."""

import pytest
import torch
import torch.nn as nn

from compiled_fsdp import explain, fully_shard
from tests.harness import compiled, distributed
from tests.harness.fake import fake_group


class First(nn.Module):
    """Before the first op: the piece before the break is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.layer(x)


class NoRead(First):
    """The piece before the break has an op, and reads no parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return self.layer(x)


class InLoop(First):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = self.layer(x)
        return x


class InHelper(First):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(broken(x))


def broken(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x + 1


class Nested(nn.Module):
    """In a module inside, called by a frame that has read nothing yet."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = InLoop()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@distributed(world_size=1, reset=True)
@pytest.mark.parametrize("cls", [First, NoRead, InLoop, InHelper, Nested])
def test_every_graph_break_has_its_line(rank, world_size, cls):
    torch.compiler.reset()
    broken_model, whole = fully_shard(cls()), fully_shard(nn.Sequential(nn.Linear(8, 8)))
    for model in (broken_model, whole):
        compiled(model)(torch.ones(2, 8)).sum().backward()
    breaks = explain(broken_model).graph_breaks
    assert any(__file__ in where and "torch._dynamo.graph_break()" in where for _, where in breaks), breaks
    assert len(breaks) == len(set(breaks))
    assert explain(whole).graph_breaks == ()


@distributed(world_size=1, reset=True)
def test_models_that_share_their_code(rank, world_size):
    """Each has its graphs explained, whoever they were compiled for."""

    def build() -> tuple[nn.Module, nn.Module]:
        model = fully_shard(nn.Sequential(nn.Linear(8, 8)))
        return model, compiled(model)

    torch.compiler.reset()
    (first, run_first), (second, run_second) = build(), build()
    run_first(torch.ones(2, 8)).sum().backward()
    assert explain(second).graphs == ()
    run_second(torch.ones(2, 8)).sum().backward()
    assert len(explain(first).graphs) == 2
    assert explain(second).graphs == explain(first).graphs


class Mlp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Looped(nn.Module):
    """Breaks the graph in a loop over equal layers; the head belongs to no layer."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(dim) for _ in range(4))
        self.head = nn.Linear(dim, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 1 and x.abs().max().item() > 1e6:
                print("large")
        return self.head(x)


class Broken(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return super().forward(x)


def words(text: object) -> str:
    """A text without its line ends."""
    return " ".join(str(text).split())


@pytest.mark.more
def test_a_graph_break_in_a_loop():
    """Dynamo gives up the forward: layers share graphs, and what the forward itself reads is uncompiled."""
    with fake_group(2):
        model = fully_shard(Looped())
        run = compiled(model)
        for batch in (8, 5):  # the second one makes the batch symbolic
            run(torch.ones(batch, 32)).sum().backward()
        found = explain(model)
        assert [found.layers[number] for number in range(4)] == [1, 1, 3, 3]
        assert [call.numbers for call in found.calls] == [(0, 1, 2, 3), (4, 5, 6, 7)]
        first = found.calls[0]
        parts = [graph.seconds for step in first.steps for graph in step.graphs]
        once = parts[2] + parts[3]  # what is in flight from one graph to the next is simulated, not added
        assert parts[0] + parts[1] + 2 * once < first.seconds < parts[0] + parts[1] + 4 * once
        assert found.to_dict()["calls"][0]["step_s"] == first.seconds
        assert first.bound is None  # a graph's first gather may be in flight before it
        text = words(found)
        assert "[2] forward of 3 equal layers, batch 8 " in text
        assert "[6] forward of 3 equal layers, any batch " in text
        assert "a training step, [0] + [1] + 3 x ([2] + [3]): " in text
        assert "a training step, [4] + [5] + 3 x ([6] + [7]): " in text
        assert "Dynamo compiles no graph of Looped.forward itself" in text
        assert "no compiled graph reads head.weight, head.bias" in text
        assert "had their first gather in flight before" in text


def test_what_fullgraph_refuses_is_not_given_up():
    """Dynamo compiles it afterwards, in two graphs."""
    with fake_group(2):
        model = fully_shard(Broken(32))
        with pytest.raises(torch._dynamo.exc.Unsupported):
            compiled(model, fullgraph=True)(torch.ones(4, 32))
        compiled(model)(torch.ones(4, 32)).sum().backward()
        found = explain(model)
        text = words(found)
        assert len(found.graphs) == 4
        assert "graph break: Call to `torch._dynamo.graph_break()`" in text
        assert "Dynamo compiles no graph" not in text


def test_parameters_that_compiled_graphs_read_are_all_known():
    """Of layers that share a graph, too: nothing is said to be uncompiled."""
    with fake_group(2):
        model = nn.Sequential(*(Mlp(32) for _ in range(3)))
        for layer in model:
            layer.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
        fully_shard(model)
        model(torch.ones(4, 32)).sum().backward()
        found = explain(model)
        assert found.uncompiled == ()
        assert max(found.layers) > 1


@pytest.mark.parametrize("way", ["wrapped", "in place", "a layer", "around"])
def test_a_model_that_another_backend_compiled(way):
    with fake_group(2):
        model = fully_shard(nn.Sequential(nn.Linear(8, 8)))
        run = model
        if way == "wrapped":
            run = torch.compile(model, backend="aot_eager")
        elif way == "in place":
            model.compile(backend="aot_eager")
        elif way == "a layer":
            model[0].compile(backend="aot_eager")
        else:
            run = torch.compile(nn.Sequential(model), backend="aot_eager")
        run(torch.ones(4, 8))
        assert "nothing compiled by backend='compiled_fsdp': it was compiled by 'aot_eager'" in words(explain(model))
        if way in ("wrapped", "in place"):
            preview = explain(run, torch.ones(4, 8), options={"codegen": "aot_eager"})
            assert len(preview.graphs) == 2
            assert "planned for backend='compiled_fsdp'; it was compiled by 'aot_eager'" in words(preview)


class Named(nn.Module):
    """Its call has arguments of the names that `explain` has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, options: float = 1.0, details: bool = False) -> torch.Tensor:
        return self.layer(x) * options


def test_arguments():
    with fake_group(2):
        model, x = fully_shard(Named()), torch.ones(4, 8)
        model.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
        ways = [(x,), ((x,),), ([x, 2.0],), ((), {"x": x}), ((x,), {"options": 2.0, "details": True})]
        plans = [explain(model, *given).graphs[0].plan for given in ways]
        assert plans == plans[:1] * len(ways)
        assert explain(model).graphs == explain(model, ()).graphs == explain(model, args=()).graphs == ()
        with pytest.raises(TypeError, match="unexpected keyword argument 'detail'"):
            explain(model, detail=True)
        with pytest.raises(TypeError, match=r"args must be a tuple .* but got dict: write explain\(model, \(x,\)\)"):
            explain(model, {"x": x})
        with pytest.raises(TypeError, match=r"kwargs must be a dictionary .* but got Tensor: .*\(model, \(x, y\)\)"):
            explain(model, x, x)
