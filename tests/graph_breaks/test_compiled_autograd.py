"""Compiled autograd: one backward graph, planned like any other."""

import contextlib
import copy
import functools
import itertools
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from compiled_fsdp import compiled_autograd, explain, fully_shard
from compiled_fsdp.runtime.context import RUNTIME
from tests.harness import (
    assert_same,
    batch,
    compiled,
    distributed,
    forward_backward,
    fsdp2,
    fsdp2_record,
    loss_of,
    planned_ops,
    run_ranks,
    shard,
    train,
    variants,
)
from tests.harness.fake import fake_group
from tests.harness.meshes import mesh_2d
from tests.harness.models import PartlyDisabled, broken, loss_of_two, small
from tests.harness.reference import assert_same_gradients

MODELS = {
    "whole": functools.partial(small, blocks=2),
    "broken": broken,
    "a value decides": lambda: broken(lambda model, number, x: -x if x.detach().sum().item() > 1e9 else x),
    "disabled": functools.partial(small, blocks=2, cls=PartlyDisabled),
}
PARAMETERS = 13  # of each


def step_of(rank: int, codegen: str = "aot_eager", **options):
    """A training step whose backward is one graph."""

    def step(model, index):
        loss = loss_of(model, rank, index)
        with compiled_autograd(codegen=codegen, **options):
            loss.backward()
        return loss.detach()

    return step


@distributed(world_size=2)
@pytest.mark.parametrize("codegen", variants(["aot_eager", "inductor"], "aot_eager"))
@pytest.mark.parametrize("kind", variants(MODELS, "broken"))
def test_one_backward_graph(rank, world_size, kind, codegen):
    """Exact, one backward graph with every reduction, captured at most twice, whatever the forward was."""
    build = MODELS[kind]
    model = shard(build(), fully_shard)
    run = compiled(model, bucket="module", codegen=codegen)
    mine = train(run, step_of(rank, codegen, bucket="module"), steps=4)
    assert_same(mine, fsdp2_record(build(), steps=4), rtol=0 if codegen == "aot_eager" else 1e-4)
    whole = [
        graph
        for graph in explain(model).graphs
        if len({read.name for read in graph.reads}) == PARAMETERS and graph.phase == "backward"
    ]
    captured = [
        graph for graph in whole if graph.count("reduce") == 3 and planned_ops(graph)["accumulate_grad"] == PARAMETERS
    ]
    assert 1 <= len(captured) <= 2
    for graph in captured:  # a publish waits for its parameter's gathers, eager code's too, by the number of the read
        assert len(graph.reads) == PARAMETERS


@pytest.mark.more
@distributed(world_size=2)
def test_backward_is_captured_again(rank, world_size):
    """For batches of another size, and after backwards without it: torch refuses some nodes that it has run before."""
    model, reference = shard(small(), fully_shard), fsdp2(small())
    run = compiled(model)
    for size in (2, 3, 5, 4):
        tokens, _ = batch(rank, size, size=size)
        for call in (run, reference):
            ours = call is run and size != 2
            with compiled_autograd(codegen="aot_eager") if ours else contextlib.nullcontext():
                call(tokens).square().mean().backward()
    assert_same_gradients(model, reference)


@pytest.mark.more
@distributed(world_size=2)
def test_every_gradient_is_reduced(rank, world_size):
    """FSDP2 leaves the root's 5 unreduced under compiled autograd, without a word (or fails, where torch refuses)."""
    reference, ours = fsdp2(small()), shard(small(), fully_shard)
    forward_backward(reference, 0)
    step_of(rank)(compiled(ours), 0)
    rights = [param.grad.full_tensor() for param in reference.parameters()]
    for mine, right in zip(ours.parameters(), rights, strict=True):
        assert torch.equal(mine.grad.full_tensor(), right)
    if torch.__version__ < "2.12":  # there FSDP2's hooks are in the graph, which fails on CPU
        return
    theirs = fsdp2(small())
    loss = loss_of(theirs, rank, 0)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss.backward()
    grads = [param.grad for param in theirs.parameters()]
    wrong = [
        not (isinstance(grad, DTensor) and torch.equal(grad.full_tensor(), right))
        for grad, right in zip(grads, rights, strict=True)
    ]
    assert sum(wrong) == 5  # if torch mends it, the page that tells of it is to be changed


@pytest.mark.more
@distributed(world_size=2, reset=True)
def test_the_config_form(rank, world_size):
    """`torch._dynamo.config.compiled_autograd`, for a training step that is compiled as a whole."""
    with torch._dynamo.config.patch(compiled_autograd=True):
        for build in (MODELS["whole"], MODELS["broken"]):
            model, reference = shard(build(), fully_shard), fsdp2(build())

            @torch.compile(backend="compiled_fsdp", options={"codegen": "aot_eager"})
            def step(tokens, targets, model=model):
                loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
                loss.backward()
                return loss.detach()

            optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
            for index in range(3):
                assert torch.equal(step(*batch(rank, index)), forward_backward(reference, index))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            assert any(planned_ops(graph)["accumulate_grad"] == PARAMETERS for graph in explain(model).graphs)


@pytest.mark.more
@distributed(world_size=2)
def test_two_forwards_and_one_backward(rank, world_size):
    """Gradients are added before they are reduced, once each, as FSDP2 does it."""
    model, reference = shard(broken(), fully_shard), fsdp2(broken())

    def step(model, index):
        loss = loss_of_two(model, rank, index)
        with compiled_autograd(codegen="aot_eager"):
            loss.backward()
        return loss.detach()

    def theirs(model, index):
        loss = loss_of_two(model, rank, index)
        loss.backward()
        return loss.detach()

    sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    ours = train(compiled(model), step, steps=2, optimizer=sgd[0])
    assert_same(ours, train(reference, theirs, steps=2, optimizer=sgd[1]), rtol=1e-5)
    (graph, *_) = [graph for graph in explain(model).graphs if planned_ops(graph)["accumulate_grad"] == PARAMETERS]
    reduced = [read for bucket in graph.plan.launches if bucket.kind == "reduce" for read in bucket.reads]
    assert len(reduced) == len(set(reduced)) == PARAMETERS


@pytest.mark.more
@distributed(world_size=2)
def test_published_gradients_belong_to_the_user(rank, world_size):
    """With Inductor, where shards have as many elements as activations."""

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    torch.manual_seed(0)
    model = fully_shard(Square())
    seen: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(model.layers):
        layer.weight.register_post_accumulate_grad_hook(
            lambda p, number=number: seen.__setitem__(number, p.grad.to_local().clone())
        )
    run = compiled(model, codegen="inductor")
    for _ in range(2):
        model.zero_grad()
        out = run(torch.ones(4, 8)).square().sum()
        with compiled_autograd(codegen="inductor"):
            out.backward()
        assert sorted(seen) == [0, 1, 2, 3]
        for number, layer in enumerate(model.layers):
            assert torch.equal(layer.weight.grad.to_local(), seen[number]), number


class Scaled(nn.Module):
    """A layer with parameters of one row, which are a row a rank and a half of nothing; not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.slope = nn.Linear(6, 6), nn.Parameter(torch.rand(2)), nn.Parameter(torch.rand(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.compiler.disable(self.apart)(self.linear(x))

    def apart(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.prelu(x, self.slope) * self.scale[0] + self.scale[1].square() * x


@pytest.mark.more
@distributed(world_size=2)
def test_small_parameters_that_eager_code_reads(rank, world_size):
    """What autograd saves of them are views with strides of their own; the loss's gradient is expanded, too."""
    for around in (lambda: compiled_autograd(codegen="aot_eager"), contextlib.nullcontext):
        torch.manual_seed(0)
        plain = nn.Sequential(*(Scaled() for _ in range(3)))
        state = {name: value.clone() for name, value in plain.state_dict().items()}
        theirs = nn.Sequential(*(Scaled() for _ in range(3)))
        theirs.load_state_dict(state)
        for model, shard_it in ((plain, fully_shard), (theirs, torch_fully_shard)):
            for layer in model:
                shard_it(layer, reshard_after_forward=True)
            shard_it(model)
        run = compiled(plain)
        for index in range(2):
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * index + rank))
            out = run(x).sum()
            with around():
                out.backward()
            expected = theirs(x).sum()
            expected.backward()
            assert torch.equal(out, expected)
            assert_same_gradients(plain, theirs)


class Checkpointed(nn.Module):
    """A module that is no unit, and is run again in backward; uncompiled, or compiled up to it and behind it."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def run_checkpoints(rank: int, mesh: DeviceMesh | None, ways: Iterable[tuple[bool, ...]]) -> None:
    """Two steps with each of ``ways``: whether reentrant, one in another, and compiled."""
    for reentrant, nested, run_compiled in ways:
        models = []
        for shard_it in (fully_shard, torch_fully_shard):
            torch.manual_seed(0)
            inner: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
            if nested:
                shard_it(inner, mesh=mesh)
                inner = nn.Sequential(nn.Linear(8, 8), Checkpointed(inner, reentrant), nn.Linear(8, 8))
            model = nn.Sequential(nn.Linear(8, 8), Checkpointed(inner, reentrant), nn.Linear(8, 8))
            if run_compiled:
                shard_it(inner, mesh=mesh)
            models.append(shard_it(model, mesh=mesh))
        ours, theirs = models
        in_hooks = []
        for param, module in ((ours[0].weight, ours[0]), (ours[2].weight, ours[2])):
            param.register_post_accumulate_grad_hook(
                lambda param, module=module, to=in_hooks: to.append(module.weight is param)
            )
        run = compiled(ours) if run_compiled else ours
        for index in range(2):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * index + rank))
            loss = run(x.requires_grad_()).sum()
            with compiled_autograd(codegen="aot_eager"):
                loss.backward()
            expected = theirs(x.detach().requires_grad_()).sum()
            expected.backward()
            torch.testing.assert_close(loss, expected)
            assert_same_gradients(ours, theirs, rtol=1e-5)
        assert in_hooks == [True] * 4
        assert RUNTIME.reducer.idle


# Whether reentrant, one in another, and compiled.
CHECKPOINTS = {
    "one in another": (False, True, False),
    "reentrant": (True, False, False),
    "reentrant, one in another": (True, True, False),
    "reentrant, compiled": (True, False, True),
}


@distributed(world_size=2)
@pytest.mark.parametrize("checkpoints", variants(CHECKPOINTS, "one in another"))
def test_checkpoints(rank, world_size, checkpoints):
    """A recomputation reads full parameters, also of one checkpoint inside another. Hooks see shards."""
    run_checkpoints(rank, None, [CHECKPOINTS[checkpoints]])


class SometimesExtra(nn.Sequential):
    """Four layers, the third one checkpointed; the first one is left out when it is told to."""

    reentrant = False

    def forward(self, x, extra=True):
        x = self[1](self[0](x) if extra else x)
        return self[3](checkpoint(self[2], x, use_reentrant=self.reentrant))


@pytest.mark.more
@distributed(world_size=2)
def test_microbatches_and_a_checkpoint(rank, world_size):
    """Compiled autograd's graph breaks at the checkpoint: where its first part ends, gradients wait for the rest.

    So each parameter's hook runs once, that of the layer which only the first microbatch has used, too.
    """
    heard: list[list[str]] = []
    models = []
    for shard_it in (fully_shard, torch_fully_shard):
        torch.manual_seed(0)
        model = SometimesExtra(*(nn.Linear(8, 8) for _ in range(4)))
        for layer in (model[0], model[3]):
            shard_it(layer)
        models.append(shard_it(model))
        heard.append([])
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(lambda param, name=name, to=heard[-1]: to.append(name))
    for number in range(2):
        for model, by in zip(models, (compiled_autograd(codegen="aot_eager"), contextlib.nullcontext()), strict=True):
            model.set_requires_gradient_sync(number == 1)
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * number + rank))
            loss = model(x, extra=number == 0).square().sum()
            with by:
                loss.backward()
    assert_same_gradients(*models, rtol=1e-5)
    assert [sorted(names) for names in heard] == [sorted(dict(models[0].named_parameters()))] * 2
    assert RUNTIME.reducer.idle


class ExtraBehindACheckpoint(nn.Sequential):
    """The checkpointed layers are frozen, and run again at the end of backward."""

    def forward(self, x, extra=True):
        x = checkpoint(self[2], x, use_reentrant=False)
        return self[1](self[0](x) if extra else x)


@distributed(world_size=2)
def test_a_last_part_without_gradients_of_parameters(rank, world_size):
    """Pending gradients of a layer that the last microbatch leaves out are reduced at the end of the backward."""
    models = []
    for shard_it in (fully_shard, torch_fully_shard):
        torch.manual_seed(0)
        model = ExtraBehindACheckpoint(*(nn.Linear(8, 8) for _ in range(3)))
        model[2].requires_grad_(False)
        models.append(shard_it(model))
    for number in range(2):
        for model, by in zip(models, (compiled_autograd(codegen="aot_eager"), contextlib.nullcontext()), strict=True):
            model.set_requires_gradient_sync(number == 1)
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * number + rank), requires_grad=True)
            loss = model(x, extra=number == 0).square().sum()
            with by:
                loss.backward()
    assert_same_gradients(*models, rtol=1e-5)
    assert RUNTIME.reducer.idle


class ReturnsTheMiddle(nn.Sequential):
    """The first part is a graph with two outputs, of which the first needs no gradient."""

    def forward(self, x):
        middle = self[0](x)
        if middle.detach().norm().item() > 1e9:
            middle = middle + 1
        torch._dynamo.graph_break()
        return self[1](middle), middle


@pytest.mark.more
@distributed(world_size=2)
def test_microbatches_and_a_graph_output_without_a_gradient(rank, world_size):
    """torch places the hook of that graph's node by the user of its first gradient, which has none."""
    models = []
    for shard_it in (fully_shard, torch_fully_shard):
        torch.manual_seed(0)
        models.append(shard_it(ReturnsTheMiddle(nn.Linear(8, 8), nn.Linear(8, 8))))
    ours, theirs = models
    for number in range(2):
        for model, run, by in ((ours, compiled(ours), compiled_autograd(codegen="aot_eager")),
                               (theirs, theirs, contextlib.nullcontext())):  # fmt: skip
            model.set_requires_gradient_sync(number == 1)
            out, middle = run(torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * number + rank)))
            with by:
                (out.square().sum() + middle.square().sum()).backward()
    assert_same_gradients(ours, theirs, rtol=1e-5)
    assert RUNTIME.reducer.idle


@pytest.mark.more
@distributed(world_size=2)
def test_microbatches_and_a_reentrant_checkpoint_with_hooks_are_refused(rank, world_size):
    """Without hooks they are right."""
    model, expected = (SometimesExtra(*(nn.Linear(8, 8) for _ in range(4))) for _ in range(2))
    expected.load_state_dict(model.state_dict())
    model.reentrant = True
    fully_shard(model)
    torch_fully_shard(expected)

    def microbatch(model, number, by):
        model.set_requires_gradient_sync(number == 1)
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * number + rank), requires_grad=True)
        loss = model(x).square().sum()
        with by:
            loss.backward()

    for number in range(2):
        microbatch(model, number, compiled_autograd(codegen="aot_eager"))
        microbatch(expected, number, contextlib.nullcontext())
    assert_same_gradients(model, expected, rtol=1e-5)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: None)
    microbatch(model, 0, compiled_autograd(codegen="aot_eager"))
    with pytest.raises(RuntimeError, match=r"pending gradient from earlier microbatches.*use_reentrant=False"):
        microbatch(model, 1, compiled_autograd(codegen="aot_eager"))


@pytest.mark.more
@distributed(world_size=4)
def test_checkpoints_with_replicas(rank, world_size):
    run_checkpoints(rank, mesh_2d("replicas", "shards"), itertools.product((False, True), repeat=3))


def test_a_group_of_one_hears_of_all_its_gradients():
    """Without launches, too, grouped hooks are called, and nothing is left behind."""
    with fake_group(1):
        model = fully_shard(small(blocks=2))
        heard: list[int] = []
        model.register_post_backward_hook(lambda params: heard.append(len(params)))
        run = compiled(model)
        for _ in range(2):
            out = run(batch(0, 0)[0]).sum()
            with compiled_autograd(codegen="aot_eager"):
                out.backward()
        assert heard == [PARAMETERS] * 2
        assert RUNTIME.reducer.idle


@pytest.mark.more
@pytest.mark.parametrize("kind", ["whole", "broken"])
@distributed(world_size=4)
def test_gathers_over_a_part_of_the_ranks(rank, world_size, kind):
    """`reshard_after_forward=2` of 4: its backward gathers over two ranks the pieces that the forwards have left. Eager
    code, which reads the head and its norm in "broken", leaves none: they are gathered over all ranks."""
    model = shard(MODELS[kind](), fully_shard, reshard_after_forward=2)
    found = train(compiled(model), step_of(rank))
    assert_same(found, train(fsdp2(MODELS[kind](), reshard_after_forward=2)), rtol=1e-6)
    graph = explain(model).graphs[-1]
    reads, launches = graph.reads, graph.plan.launches
    all_ranks = next(bucket.group_id for bucket in launches if bucket.kind == "reduce")
    gathers = [bucket for bucket in launches if bucket.kind == "gather"]
    gathered = {reads[index].name: bucket.group_id for bucket in gathers for index in bucket.reads}
    whole = {name for name, group in gathered.items() if group == all_ranks}
    assert whole == ({"head.weight", "norm.weight", "norm.bias"} if kind == "broken" else set())
    assert gathered.keys() - whole >= {"blocks.0.up.weight", "blocks.1.up.weight"}
    for read in reads:
        if read.name in gathered:
            assert read.backward_group == (None if read.name in whole else (gathered[read.name], 2))


def _two_forwards(rank, twice, compiles, model, index):
    """A step whose backward is of two forwards if its index is ``twice``."""
    loss = loss_of(model, rank, index)
    if index == twice:
        loss = loss + loss_of(model, rank, 10 + index)
    with compiled_autograd(codegen="aot_eager") if compiles else contextlib.nullcontext():
        loss.backward()
    return loss.detach()


@pytest.mark.parametrize("twice", variants([1, 0], 1))
@distributed(world_size=4)
def test_two_forwards_before_a_backward_that_gathers_over_a_part_of_the_ranks(rank, world_size, twice):
    """Such a backward gathers each parameter once for each forward, in the second step or in the first one."""
    step = functools.partial(_two_forwards, rank, twice)
    model = shard(broken(), fully_shard, reshard_after_forward=2)
    found = train(compiled(model), functools.partial(step, True))
    assert_same(found, train(fsdp2(broken(), reshard_after_forward=2), functools.partial(step, False)), rtol=1e-6)


class Part(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8 * width).view(8, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).tanh()


class Parts(nn.Module):
    """A model of three layers, all of which are compiled, or only one. The last two may share a weight."""

    def __init__(self, ties: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = Part(8), Part(8), Part(8 if ties else 11)
        if ties:
            self.third.weight = self.second.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x)))


@pytest.mark.parametrize("ties", variants([False, True], False))
@distributed(world_size=4)
def test_parameters_that_eager_code_reads_are_gathered_over_all_ranks(rank, world_size, ties):
    """Eager code leaves no pieces for a backward over two ranks. The plan for a graph that does is not followed."""

    def step(context, run, index):
        loss = run(torch.arange(8.0).view(1, 8).sin() + rank + index).square().mean()
        with context():
            loss.backward()
        return loss.detach()

    reference = Parts(ties)
    torch_fully_shard(reference, reshard_after_forward=2)
    expected = train(reference, functools.partial(step, contextlib.nullcontext))
    options = {"codegen": "aot_eager", "bucket": 25}
    for name in ("", "second", "third"):
        model = fully_shard(Parts(ties), reshard_after_forward=2)
        model.get_submodule(name).compile(backend="compiled_fsdp", options=options)
        assert_same(train(model, functools.partial(step, lambda: compiled_autograd(**options))), expected, rtol=1e-6)


class DecidesInside(nn.Sequential):
    """A layer that a reentrant checkpoint runs uncompiled, because a value decides in it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x if x.detach().sum().item() > 1e9 else 0.5 * x


class ChecksTwice(nn.Module):
    """A layer that is called twice, with a reentrant checkpoint before the rest of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.rest = DecidesInside(nn.Linear(8, 8)), nn.Linear(8, 8)

    def once(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.inside, x, use_reentrant=True)
        return x + self.rest(x).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.once(x)
        torch._dynamo.graph_break()
        return self.once(x)


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("reshard", variants([None, False], None))
def test_parts_of_a_backward_that_reduce_the_same_parameters_once_and_twice(rank, world_size, reshard):
    """The checkpoint of the second call cuts the backward of two forwards: a part has the gradients of one call or two.

    The first call's checkpoint has no backward, because its input needs no gradient.
    """
    torch.manual_seed(7)
    model = nn.Sequential(ChecksTwice())
    reference = copy.deepcopy(model)
    fully_shard(model[0], reshard_after_forward=reshard)
    run = compiled(fully_shard(model, reshard_after_forward=reshard))
    for step in range(3):
        for _ in range(1 + (step == 0)):  # microbatches
            inputs = [torch.randn(2, 8) for _ in range(1 + (step == 0))]
            loss = sum(run(x).square().mean() for x in inputs)
            with compiled_autograd(codegen="aot_eager"):
                loss.backward()
            sum(reference(x).square().mean() for x in inputs).backward()
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            dist.all_reduce(expected.grad)
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad / world_size)
            param.grad = expected.grad = None


class ChoosesByValue(nn.Sequential):
    """Adds a half or a quarter of its layers' result, by the sign of an input. This breaks the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return x + (0.5 * y if x.flatten()[0].item() > 0 else 0.25 * y)


class FrozenInCheckpoints(nn.Module):
    """Reentrant checkpoints: of a layer, of a frozen one, and of the first layer again."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.frozen = ChoosesByValue(nn.Linear(8, 8)).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.norm, self.embedding(tokens), use_reentrant=True)
        torch._dynamo.graph_break()
        x = checkpoint(self.frozen, x, use_reentrant=True)
        torch._dynamo.graph_break()
        return checkpoint(self.norm, x, use_reentrant=True)


@distributed(world_size=2, reset=True)
def test_a_frozen_layer_in_a_checkpoint_chooses_by_value(rank, world_size):
    """A backward runs the layer again in code that follows a plan, and no forward has followed one for it."""
    torch.manual_seed(7)
    model = FrozenInCheckpoints()
    reference = copy.deepcopy(model)
    for layer in (model.norm, model.frozen):
        fully_shard(layer, reshard_after_forward=True)
    run = compiled(fully_shard(model, reshard_after_forward=True))
    for step in range(2):
        for micro in range(1 + step):
            model.set_requires_gradient_sync(micro == step)
            loss = expected = torch.zeros(())
            for forward in range(1 + step):
                seed = 100 * step + 10 * micro + 2 * forward + rank
                tokens = torch.randint(11, (1, 4), generator=torch.Generator().manual_seed(seed))
                loss, expected = loss + run(tokens).pow(3).mean(), expected + reference(tokens).pow(3).mean()
            with compiled_autograd(codegen="aot_eager"):
                loss.backward()
            expected.backward()
        for param, exact in zip(model.parameters(), reference.parameters(), strict=True):
            if exact.requires_grad:
                dist.all_reduce(exact.grad)
                torch.testing.assert_close(param.grad.full_tensor(), exact.grad / world_size)
                param.grad = exact.grad = None


@pytest.mark.more
@distributed(world_size=4)
def test_replicas(rank, world_size):
    mesh = mesh_2d("replicas", "shards")
    model = shard(broken(), fully_shard, mesh=mesh)
    assert_same(train(compiled(model), step_of(rank)), train(fsdp2(broken(), mesh=mesh)), rtol=1e-6)


def planned_texts(rank: int, world_size: int) -> list[str]:
    model = shard(broken(blocks=1), fully_shard)
    step_of(rank)(compiled(model), 0)
    return [graph.planned for graph in explain(model).graphs]


@pytest.mark.more
def test_four_ranks_plan_the_same():
    """The planned graphs are equal on all ranks, with uneven shards."""
    first, *others = run_ranks(planned_texts, 4)
    assert any("accumulate_grad" in text for text in first)
    assert all(other == first for other in others)


class HalfWeight(nn.Module):
    """A layer that computes with another weight in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.func.functional_call(self.inner, {"weight": self.inner.weight * 0.5}, (x,))


class HalfWeightsInCheckpoints(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@distributed(world_size=2)
@pytest.mark.parametrize("compiles", variants([False, True], False))
def test_the_backward_puts_parameters_back(rank, world_size, compiles):
    """functional_call puts back the full weight that it has found when backward runs the checkpoint again.

    The model would have that tensor for its parameter: no gradient, and steps that change nothing.
    """
    torch.manual_seed(0)
    model = HalfWeightsInCheckpoints(HalfWeight(), HalfWeight())
    reference = copy.deepcopy(model)
    run = fully_shard(model)
    if compiles:
        run = compiled(model)
    for _ in range(2):
        x = torch.randn(2, 4, requires_grad=True)
        with compiled_autograd(codegen="aot_eager"):
            run(x).square().sum().backward()
        reference(x).square().sum().backward()
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert isinstance(param, DTensor)
            dist.all_reduce(expected.grad)
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad / 2)
            param.grad = expected.grad = None
