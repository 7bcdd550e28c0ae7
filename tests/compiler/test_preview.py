"""``explain(model, *args)``: a call is planned that is not made, and leaves nothing behind."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from compiled_fsdp import explain, fully_shard
from compiled_fsdp.state.registry import running_units
from tests.harness import batch, compiled, distributed, loss_of, shard
from tests.harness.fake import fake_group
from tests.harness.models import broken, small

AOT = {"codegen": "aot_eager"}


def inputs() -> torch.Tensor:
    return batch(0, 0)[0]


@pytest.mark.parametrize("codegen", ["aot_eager", "inductor"])
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


def test_a_graph_break_is_told_with_its_line():
    with fake_group(2):
        model = shard(broken(), fully_shard)
        preview = explain(model, inputs(), options=AOT)
        assert preview.graphs == ()
        (found,) = preview.graph_breaks
        assert "graph_break()" in found[1]
        assert "take a step" in str(preview)
        # and the step itself tells its own breaks alone
        loss_of(compiled(model), 0, 0).backward()
        assert len(explain(model).graph_breaks) == len(set(explain(model).graph_breaks)) == 1


def test_errors_say_what_to_do():
    with fake_group(2):
        model = shard(small(), fully_shard)
        with pytest.raises(ValueError, match="Did you mean"):
            explain(model, inputs(), options={"bukcet": "auto"})
        with torch._dynamo.config.patch(disable=True), pytest.raises(RuntimeError, match="switched off"):
            explain(model, inputs())
        with pytest.raises(ValueError, match="no sharded parameter"):
            explain(small(), inputs())


def test_options_are_those_of_the_compiled_model():
    with fake_group(2):
        model = shard(small(), fully_shard)
        alone = explain(compiled(model, bucket="none"), inputs())
        assert alone.graphs[0].count("gather") == len(alone.graphs[0].reads)
        by_unit = explain(compiled(model, bucket="none"), inputs(), options={**AOT, "bucket": "module"})
        assert by_unit.graphs[0].count("gather") < alone.graphs[0].count("gather")


@distributed(world_size=2)
def test_one_rank_may_ask_alone(rank, world_size):
    model = shard(small(), fully_shard)
    if rank == 0:
        assert len(explain(model, inputs(), options=AOT).graphs) == 2
    loss_of(compiled(model), rank, 0).backward()
    dist.barrier()
