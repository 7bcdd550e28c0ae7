"""``explain(model, *args)``: a call is planned that is not made, and leaves nothing behind."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from compiled_fsdp import explain, fully_shard
from compiled_fsdp.state.registry import running_units
from tests.harness import batch, compiled, distributed, loss_of, shard, variants
from tests.harness.fake import fake_group
from tests.harness.models import broken, small

AOT = {"codegen": "aot_eager"}


def inputs() -> torch.Tensor:
    return batch(0, 0)[0]


@pytest.mark.parametrize("codegen", variants(["aot_eager", "inductor"], "aot_eager"))
def test_the_plan_is_that_of_the_first_step(codegen):
    with fake_group(2):
        model = shard(small(), fully_shard)
        run = compiled(model, codegen=codegen)
        preview = explain(run, inputs())
        assert [graph.phase for graph in preview.graphs] == ["forward", "backward"]
        run(inputs()).sum().backward()
        for planned, real in zip(preview.graphs, explain(model).graphs, strict=True):
            assert planned.plan == real.plan
            assert planned.tasks == real.tasks
            assert planned.collectives == real.collectives


def test_without_gradients():
    with fake_group(2), torch.no_grad():
        model = shard(small(), fully_shard)
        (graph,) = explain(model, inputs(), options=AOT).graphs
        assert graph.phase == "inference"
        assert graph.count("gather") > 0


class Remembers(nn.Module):
    """Counts its calls, in Python and in a buffer, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.number = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += 1
        self.calls += 1
        return nn.functional.dropout(self.layer(x), 0.5)


def test_nothing_is_changed():
    def state() -> dict[str, torch.Tensor]:
        tensors = dict(model.state_dict())
        tensors |= {f"{name}.grad": param.grad for name, param in model.named_parameters()}
        local = {name: getattr(value, "to_local", lambda value=value: value)() for name, value in tensors.items()}
        return {name: value.nan_to_num().clone() for name, value in local.items()}

    with fake_group(2):
        model = fully_shard(Remembers())
        called = []
        model.register_forward_pre_hook(lambda module, args: called.append(module.number))
        model(torch.ones(4, 8)).sum().backward()
        before, random = state(), torch.get_rng_state()
        for _ in range(2):  # the first leaves nothing behind for the second
            graphs = explain(model, torch.ones(4, 8), options=AOT).graphs
            assert [graph.is_fragment for graph in graphs] == [False, False]
        assert torch.equal(torch.get_rng_state(), random)
        assert (model.number, called) == (1, [0])
        assert all(torch.equal(value, before[name]) for name, value in state().items())
        assert not running_units()
        assert explain(model).graphs == ()


def test_later_compiles_go_as_they_would_have_gone():
    """Another batch size than the preview's does not count as the second one."""
    with fake_group(2):
        model = fully_shard(nn.Sequential(nn.Linear(8, 8)))
        explain(model, torch.ones(6, 8), options=AOT)
        run = compiled(model)
        run(torch.ones(4, 8)).sum().backward()
        graphs = explain(model).graphs
        assert len(graphs) == 2
        assert graphs[0].balance is None  # no symbolic size
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
        run(torch.ones(4, 8)).sum().backward()
        assert len(explain(model).graphs) == 2


def test_on_the_meta_device():
    with fake_group(64):
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
        fully_shard(model)
        preview = explain(model, torch.ones(4, 512, device="meta"), options={**AOT, "hardware": "h100"})
        assert [graph.phase for graph in preview.graphs] == ["forward", "backward"]
        with pytest.raises(RuntimeError, match="should be materialized from meta device"):
            model(torch.ones(4, 512, device="meta"))


class Straight(nn.Module):
    """Three layers, and a graph break behind the second one: `broken` says how."""

    def __init__(self, broken: str, *, loop: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.broken, self.loop = broken, loop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.loop:
            for layer in self.layers:
                x = layer(x)
                if x.abs().max().item() > 1e6:  # in a loop
                    print("large")
            return x
        x = self.layers[1](self.layers[0](x))
        if self.broken == "item":
            if x.abs().max().item() > 1e6:  # item
                print("large")
        elif self.broken == "tensor":
            if x.sum() > 1e6:  # tensor
                print("large")
        elif self.broken == "sizes":
            x = x * x[x > 0].shape[0]  # sizes
        elif self.broken == "print":
            print("here")  # print
        return self.layers[2](x)


@pytest.mark.parametrize(
    ("broken", "captured"),
    variants(
        [("item", False), ("item", True), ("tensor", False), ("sizes", False), ("print", False)],
        ("item", False),
        ("print", False),
    ),
)
def test_a_graph_break_is_told_with_its_line(broken, captured, capsys):
    """Whatever breaks the graph; the graph in front of it is planned as the step plans it, and nothing has run."""
    with fake_group(2), torch._dynamo.config.patch(capture_scalar_outputs=captured):
        model = fully_shard(Straight(broken))
        model.compile(backend="compiled_fsdp", options=AOT)
        preview = explain(model, inputs_of_8())
        assert capsys.readouterr().out == ""
        (found,) = preview.graph_breaks
        assert found[1].endswith(f"# {broken}")
        assert "take a step" in str(preview)
        # and the step itself tells its own breaks alone
        model(inputs_of_8()).sum().backward()
        after = explain(model)
        assert [where for _, where in after.graph_breaks] == [found[1]]
        assert [graph.phase for graph in preview.graphs] == ["forward", "backward"]
        for planned, real in zip(preview.graphs, after.graphs, strict=False):
            assert (planned.plan, planned.reads) == (real.plan, real.reads)
        assert not [advice for advice in preview.advice if advice.kind == "graph_break"]  # what it costs is not known


@pytest.mark.parametrize(
    "build",
    [
        lambda: Straight("", loop=True),
        lambda: nn.Sequential(Straight("item")),
        pytest.param(broken, marks=pytest.mark.more),
    ],
)
def test_a_graph_break_in_a_loop_or_deeper(build, capsys):
    """Dynamo begins its graphs elsewhere there: nothing is planned that a step would not compile."""
    with fake_group(2):
        model = fully_shard(build())
        for _ in range(2):  # what Dynamo gives up it does not try again
            preview = explain(model, inputs() if build is broken else inputs_of_8(), options=AOT)
            assert preview.graphs == ()
            (found,) = preview.graph_breaks
            assert ".item()" in found[1] or "graph_break()" in found[1]
        assert capsys.readouterr().out == ""
        # and another model is traced
        assert len(explain(fully_shard(nn.Linear(8, 8)), inputs_of_8(), options=AOT).graphs) == 2


def test_a_whole_graph_is_captured_as_it_would_be():
    """With `fullgraph=True` Dynamo captures sizes that depend on values; without, a step breaks the graph there."""
    with fake_group(2):
        model = fully_shard(Straight("sizes"))
        assert explain(compiled(model, fullgraph=True), inputs_of_8()).graph_breaks == ()
        assert explain(compiled(model), inputs_of_8()).graph_breaks != ()


def inputs_of_8() -> torch.Tensor:
    return torch.linspace(-1, 1, 32).view(4, 8)


def test_errors_say_what_to_do():
    with fake_group(2):
        model = shard(small(), fully_shard)
        for wrong in (model, fully_shard(Straight("item"))):  # a graph break does not hide it
            with pytest.raises(ValueError, match="Did you mean"):
                explain(wrong, inputs(), options={"bukcet": "auto"})
        with torch._dynamo.config.patch(disable=True), pytest.raises(RuntimeError, match="switched off"):
            explain(model, inputs())
        with pytest.raises(ValueError, match="no sharded parameter"):
            explain(small(), inputs())


@pytest.mark.more
def test_options_are_those_of_the_compiled_model():
    with fake_group(2):
        model = shard(small(), fully_shard)
        alone = explain(compiled(model, bucket="parameter"), inputs())
        assert alone.graphs[0].count("gather") == len(alone.graphs[0].reads)
        by_unit = explain(compiled(model, bucket="parameter"), inputs(), options={**AOT, "bucket": "module"})
        assert by_unit.graphs[0].count("gather") < alone.graphs[0].count("gather")
        model.compile(backend="compiled_fsdp", options={**AOT, "bucket": "parameter"})
        assert explain(model, inputs()).graphs[0].plan == alone.graphs[0].plan


def test_a_forward_that_reads_nothing_does_not_run(capsys):
    with fake_group(2):
        model = fully_shard(Talks())
        assert explain(model, inputs_of_8(), options=AOT).graphs == ()
        assert capsys.readouterr().out == ""


class Talks(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        print("here")
        return y


@distributed(world_size=2)
def test_one_rank_may_ask_alone(rank, world_size):
    model = shard(small(), fully_shard)
    if rank == 0:
        assert len(explain(model, inputs(), options=AOT).graphs) == 2
    loss_of(compiled(model), rank, 0).backward()
    dist.barrier()
