"""torch's pipeline schedules drive sharded stages."""

import gc
import re
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.stage import stage_backward_input

import compiled_fsdp
from compiled_fsdp import explain
from compiled_fsdp.state.unit import ShardState
from tests.harness import Transformer, assert_same, batch, distributed, shard, train, variants
from tests.harness.logs import warnings_about_sync
from tests.harness.models import small
from tests.harness.ours import counted

MICROBATCHES = 4
GPIPE, ONE_F_ONE_B = "ScheduleGPipe", "Schedule1F1B"
FSDP2 = torch.distributed.fsdp.fully_shard


class Part(nn.Module):
    """Some blocks of a Transformer, with what is before the first one and after the last one."""

    def __init__(self, model: Transformer, index: int, count: int) -> None:
        super().__init__()
        size = len(model.blocks) // count
        self.blocks = model.blocks[index * size : (index + 1) * size]
        self.first, self.last = index == 0, index == count - 1
        if self.first:
            self.embedding, self.position = model.embedding, model.position
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.embedding(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Pipeline:
    """This rank's stages of a small Transformer, sharded over "dp" of a mesh of 2 x 2, and the schedule that drives
    them."""

    def __init__(self, schedule, shard_by=compiled_fsdp.fully_shard, *, run="eager", per_rank=1, **options):
        self.mesh = mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        pp, count = mesh["pp"].get_local_rank(), 2 * per_rank
        self.first, self.last, self.rank = pp == 0, pp == 1, mesh["dp"].get_local_rank()
        model = small(blocks=count)
        indices = range(pp, count, 2)
        self.parts = nn.ModuleList(shard(Part(model, index, count), shard_by, mesh=mesh["dp"]) for index in indices)
        called = list(self.parts)
        how = {"backend": "compiled_fsdp", "options": {"codegen": "aot_eager"}}
        if run == "module.compile":
            for part in called:
                part.compile(**how)
        elif run == "torch.compile":
            called = [torch.compile(part, **how) for part in called]
        cpu, group = torch.device("cpu"), mesh["pp"].get_group()
        stages = [
            pipelining.PipelineStage(part, index, count, cpu, group=group)
            for part, index in zip(called, indices, strict=True)
        ]
        driven = stages[0] if schedule in (GPIPE, ONE_F_ONE_B) else stages
        self.schedule = getattr(pipelining, schedule)(driven, MICROBATCHES, loss_fn=loss_fn, **options)

    def run(self, index: int, call: str = "step") -> torch.Tensor:
        """The schedule on a batch. Returns the mean loss, on the ranks of the last stage."""
        tokens, targets = batch(self.rank, index, size=2 * MICROBATCHES)
        losses: list[torch.Tensor] = []
        inputs = (tokens,) if self.first else ()
        end = {"target": targets, "losses": losses} if self.last else {}
        getattr(self.schedule, call)(*inputs, **end)
        return torch.stack(losses).mean().detach() if self.last else torch.zeros(())

    def by_hand(self, index: int) -> torch.Tensor:
        """A loss of the stage alone."""
        tokens = batch(self.rank, index)[0]
        return self.parts[0](tokens if self.first else F.one_hot(tokens % 16, 16).float()).square().mean()

    def train(self, steps: int = 2):
        return train(self.parts, lambda parts, index: self.run(index), steps=steps)

    def reductions(self, index: int) -> int:
        return counted(lambda: self.run(index))["RS"]

    def left_over(self) -> list[str]:
        """What of a step is still there."""
        units = [unit._fsdp_unit for part in self.parts for unit in (part, *part.blocks)]
        found = [p.name for u in units for p in u.parameters if p.grads.waits or p.retained is not None]
        return found + [unit.name for unit in units if unit.state is not ShardState.SHARDED or unit.depth]

    def before_the_first_step(self) -> None:
        for part in self.parts:
            part.set_requires_gradient_sync(False)


@pytest.mark.parametrize(
    ("schedule", "told"),
    variants([(GPIPE, True), (ONE_F_ONE_B, False), (GPIPE, False), (ONE_F_ONE_B, True)], (ONE_F_ONE_B, False)),
)
@distributed(world_size=4)
def test_uncompiled_stages(rank, world_size, schedule, told):
    """FSDP2's gradients, and from the second step on, or the first if it was told, one reduction a unit and step."""
    expected = Pipeline(schedule, FSDP2).train()
    ours = Pipeline(schedule)
    if told:
        ours.before_the_first_step()
    with warnings_about_sync() as said:
        assert_same(ours.train(), expected, rtol=1e-5)
    assert ours.left_over() == []
    assert not (told and said)
    assert [ours.reductions(index) for index in range(2)] == [2, 2]
    if told:
        new = Pipeline(schedule)
        new.before_the_first_step()
        assert [new.reductions(index) for index in range(2)] == [2, 2]


@pytest.mark.parametrize("run", ["module.compile", pytest.param("torch.compile", marks=pytest.mark.more)])
@distributed(world_size=4)
def test_compiled_stages(rank, world_size, run):
    """Three variants under 1F1B. A stage that torch.compile wraps is none of FSDP2's for a schedule: each microbatch is
    reduced."""
    of_module = run == "module.compile"
    schedule = ONE_F_ONE_B if of_module else GPIPE
    expected = Pipeline(schedule, FSDP2).train()
    ours = Pipeline(schedule, run=run)
    if of_module:
        ours.before_the_first_step()
    assert_same(ours.train(), expected, rtol=1e-5)
    assert ours.left_over() == []
    reductions = ours.reductions(0)
    assert (reductions == 2) if of_module else (reductions >= MICROBATCHES)
    forwards = [graph for graph in explain(ours.parts[0]).graphs if graph.phase == "forward"]
    assert len(forwards) == (3 if of_module else 1)


@pytest.mark.more
@distributed(world_size=4)
def test_several_stages_on_a_rank(rank, world_size):
    expected = Pipeline("ScheduleInterleaved1F1B", FSDP2, per_rank=2).train()
    ours = Pipeline("ScheduleInterleaved1F1B", per_rank=2)
    ours.before_the_first_step()
    assert_same(ours.train(), expected, rtol=1e-5)
    assert ours.left_over() == []
    assert ours.reductions(0) == 3  # of the two blocks, and what is at this end of the model


@distributed(world_size=4)
def test_forward_only(rank, world_size):
    """Before, between and after steps."""
    records = []
    for shard_by in (FSDP2, compiled_fsdp.fully_shard):
        pipeline = Pipeline(ONE_F_ONE_B, shard_by)

        def step(parts, index, pipeline=pipeline):
            pipeline.run(index)
            for parameter in parts.parameters():
                assert parameter.grad is not None
            return pipeline.run(index, "eval")

        records.append(train(pipeline.parts, step, steps=2))
    assert_same(records[1], records[0], rtol=1e-5)
    assert pipeline.left_over() == []


@distributed(world_size=4)
def test_a_stage_trained_without_its_schedule(rank, world_size):
    """Its gradients come with its backward."""
    grads = []
    for shard_by in (FSDP2, compiled_fsdp.fully_shard):
        pipeline = Pipeline(GPIPE, shard_by)
        pipeline.run(0)
        (part,) = pipeline.parts
        part.zero_grad()
        pipeline.by_hand(7).backward()
        grads.append([p.grad.full_tensor() for p in part.parameters()])
    for mine, theirs in zip(*grads[::-1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    assert pipeline.left_over() == []


@distributed(world_size=4)
def test_after_an_exception(rank, world_size):
    """`reset_iter_state()` drops what a step that failed had added up."""
    expected = Pipeline(GPIPE, FSDP2).train()
    ours = Pipeline(GPIPE)
    (part,) = ours.parts
    part.set_requires_gradient_sync(False)
    part.set_reshard_after_backward(False)
    ours.by_hand(7).backward()  # as far as that step came
    assert ours.left_over()
    part.reset_iter_state()
    assert_same(ours.train(), expected, rtol=1e-5)


@pytest.mark.parametrize("collects", [False, True])
@distributed(world_size=4)
def test_split_backwards_are_refused(rank, world_size, collects):
    """At the step's end, on every rank, whichever of the step's autograd graphs Python has collected by then."""
    ours = Pipeline("ScheduleInterleavedZeroBubble", per_rank=2)
    ours.before_the_first_step()

    def split(*args):
        gc.collect()
        return stage_backward_input(*args)

    with (
        mock.patch("torch.distributed.pipelining.stage.stage_backward_input", split) if collects else nullcontext(),
        pytest.raises(NotImplementedError, match="Use a schedule of full backwards"),
    ):
        ours.run(0)


@pytest.mark.more
@pytest.mark.skipif(torch.__version__ < "2.15", reason="schedules have the option from torch 2.15 on")
@distributed(world_size=4)
def test_reductions_that_are_waited_for_later(rank, world_size):
    schedule = "ScheduleInterleaved1F1B"
    ours = Pipeline(schedule, per_rank=2, defer_reduce_grad_wait=True)
    ours.before_the_first_step()
    assert_same(ours.train(), Pipeline(schedule, FSDP2, per_rank=2).train(), rtol=1e-5)
    assert ours.left_over() == []


@pytest.mark.more
@distributed(world_size=4)
def test_the_recipe_of_the_documentation(rank, world_size):
    page = (Path(__file__).parents[2] / "docs/parallelism.md").read_text()
    (recipe,) = re.findall(
        r"```python\n(for block in stage_module.*?)dist.destroy_process_group\(\)\n```", page, re.DOTALL
    )
    expected = Pipeline(ONE_F_ONE_B, FSDP2)
    optimizer = torch.optim.AdamW(expected.parts.parameters())
    mesh = expected.mesh
    index = mesh["pp"].get_local_rank()
    batches = [batch(expected.rank, step, size=2 * MICROBATCHES) for step in range(2)]
    part = Part(small(blocks=2), index, 2)
    names = {"mesh": mesh, "stage_module": part, "batches": batches, "loss_fn": loss_fn, "torch": torch}
    names |= {"PipelineStage": pipelining.PipelineStage, "Schedule1F1B": pipelining.Schedule1F1B}
    with warnings_about_sync() as said:
        exec(recipe, names | {"fully_shard": compiled_fsdp.fully_shard})
    assert not said
    for step in range(2):
        optimizer.zero_grad()
        expected.run(step)
        optimizer.step()
    for mine, theirs in zip(part.parameters(), expected.parts.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs.full_tensor(), rtol=1e-5, atol=1e-6)
