"""Equal layers are traced once: graphs, plans and gradients are those of layers that are traced one by one.

More than 400 lines: each model is a reason why a body may not be traced as the whole graph.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx import GraphModule, Node

from compiled_fsdp import fully_shard
from compiled_fsdp.compat import region_calls
from compiled_fsdp.compat.versions import version_of
from compiled_fsdp.compiler.compilation import Compilation
from compiled_fsdp.passes.graph import calls
from tests.harness import compiled, variants
from tests.harness.fake import one_rank

INVOKE = torch.ops.higher_order.invoke_subgraph
pytestmark = pytest.mark.skipif(
    version_of(torch.__version__) != region_calls.TRIED, reason="layers are traced one by one in other versions"
)


class Layer(nn.Module):
    """More calls than the least number that is traced once."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.scale = nn.Parameter(torch.ones(dim))

    def inner(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        a, b = y.chunk(2, dim=-1)
        y = torch.cat((a * b.sigmoid(), F.silu(b) - a.tanh()), dim=-1)
        return self.down(F.gelu(y)) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Model(nn.Module):
    layer: type[nn.Module] = Layer
    has_units = True

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(self.layer() for _ in range(layers))
        self.norm = nn.RMSNorm(8)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Dropout(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.inner(x), 0.5)


class DropoutModel(Model):
    layer = Dropout


class OneByOne(Model):
    """Each layer is called on a line of its own, which is in the stacks of its nodes."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.layers[0](x)
        x = self.layers[1](x)
        x = self.layers[2](x)
        return self.head(self.norm(x))


class Tied(Model):
    """All layers have one weight; its gradients are added in the order of the layers, last first."""

    has_units = False

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.up.weight = self.layers[0].up.weight
        self.head.weight = self.embedding.weight


class Other(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x - self.inner(x)


class OtherInTheMiddle(Model):
    def __init__(self) -> None:
        super().__init__(layers=7)
        self.layers[3].__class__ = Other


class SkipInTheMiddle(Model):
    """One layer has the same input as the first one, so that the embedding's gradients are added up in its order."""

    def __init__(self) -> None:
        super().__init__(layers=6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(first if i == 2 else x)
        return self.head(self.norm(x))


class Residual(Layer):
    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        return x + self.inner(x * first) + first * first


class ResidualUsedThreeTimes(Model):
    """Each layer takes the embedding three times, so that a body would add up its gradients in another order."""

    layer = Residual

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, first)
        return self.head(self.norm(x))


class Once(Layer):
    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        return x + self.inner(x) + first.tanh()


class ResidualUsedOnce(ResidualUsedThreeTimes):
    """Each layer takes the embedding once."""

    layer = Once


class Two(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return x + y, (y * y).mean()


class Detached(Model):
    """A result of each layer is used, but not differentiated."""

    layer = Two

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, losses = self.embedding(tokens), 0.0
        for layer in self.layers:
            x, loss = layer(x)
            losses = losses + loss.detach()
        return self.head(self.norm(x)), losses


class Losses(Model):
    """Each layer has two results, of which one goes to the end."""

    layer = Two

    def forward(self, tokens: Tensor) -> Tensor:
        x, losses = self.embedding(tokens), 0.0
        for layer in self.layers:
            x, loss = layer(x)
            losses = losses + loss
        return self.head(self.norm(x)) + losses


class Buffered(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x + self.inner(x * self.table) * self.calls


class Buffers(Model):
    layer = Buffered


class Normed(Layer):
    """A function that writes to what it is given, without a name that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.batch_norm(x.flatten(0, 1)).view_as(x))


class BatchNorm(Model):
    layer = Normed


class Biased(Layer):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + self.inner(x + bias)


class WrittenLater(Model):
    """Autograd would save the buffer for the backward of each body, but the buffer is written to before it."""

    layer = Biased

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.rand(8))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.bias)
        self.write()
        return self.head(self.norm(x))

    def write(self) -> None:
        self.bias.add_(1)


class WrittenByRelu(WrittenLater):
    """The name of the function does not say that it writes."""

    def write(self) -> None:
        F.relu(self.bias[2:], inplace=True)


class WrittenByNorm(WrittenLater):
    def write(self) -> None:
        F.batch_norm(torch.ones(2, 8), self.bias, torch.ones(8), training=True)


class Code(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x * self.code.detach())


class DetachedParameter(Model):
    """The parameter has no gradient; a body would give it one of zeros."""

    layer = Code


class DetachedInside(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return x + y, (y * y).mean().detach()


class DetachedResult(Model):
    """With torch 2.11 the detached result of a body would require a gradient."""

    layer = DetachedInside

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, losses = self.embedding(tokens), []
        for layer in self.layers:
            x, loss = layer(x)
            losses.append(loss)
        return self.head(self.norm(x)), torch.stack(losses)


class TwoNames(Layer):
    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return x + self.inner(x * a) + b.tanh()


class SameTensor(Model):
    """``float()`` returns its input, so each layer uses one tensor twice, under two names."""

    layer = TwoNames

    def forward(self, tokens: Tensor) -> Tensor:
        first = self.embedding(tokens)
        x = first.cos()
        for layer in self.layers:
            x = layer(x, first.float(), first)
        return self.head(self.norm(x))


class Branches(Model):
    """A branch has a branch."""

    def forward(self, tokens: Tensor) -> Tensor:
        def inside(x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 1, lambda x: x.sin(), lambda x: x.cos(), (x,))

        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.head(torch.cond(x.sum() > -1e9, inside, lambda x: x * 2, (x,)))


class Frozen(Model):
    def __init__(self) -> None:
        super().__init__(layers=5)
        self.layers[1].up.weight.requires_grad_(False)


MODELS: dict[str, Callable[[], Model]] = {
    cls.__name__: cls
    for cls in (
        Model, DropoutModel, OneByOne, Tied, OtherInTheMiddle, SkipInTheMiddle, ResidualUsedThreeTimes,
        ResidualUsedOnce, Detached, Losses, Buffers, BatchNorm, Frozen, WrittenLater, WrittenByRelu, WrittenByNorm,
        DetachedParameter, DetachedResult, SameTensor,
    )
}  # fmt: skip
"""Models, each with a reason why its graph might be another one if its layers are traced once."""
LEFT = {
    "ResidualUsedThreeTimes", "Detached", "Buffers", "BatchNorm", "WrittenLater", "WrittenByRelu", "WrittenByNorm",
    "DetachedParameter", "DetachedResult", "SameTensor",
}  # fmt: skip
"""Those whose layers are traced one by one."""


def text(gm: GraphModule) -> str:
    """A graph with numbers for its nodes; with sizes, modules, tags, and the code lines of forward nodes."""
    number: dict[Node, str] = {}
    lines = []
    for node in gm.graph.nodes:
        number[node] = f"%{len(number)}"
        value = node.meta.get("val")
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        facts = (
            None if node.op == "placeholder" else node.target,
            torch.fx.map_arg((node.args, node.kwargs), number.__getitem__),
            (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else None,
            [name for name, _ in stack.values()],
            None if node.meta.get("partitioner_tag") == "is_backward" else node.meta.get("stack_trace"),
            node.meta.get("partitioner_tag"),
        )
        lines.append(f"{number[node]} " + " ".join(map(str, facts)))
    return "\n".join(lines)


@dataclasses.dataclass
class Seen:
    """The Dynamo graphs' calls of bodies; the texts of the graphs that passes saw or made, each with its name; and
    the reasons why layers were traced one by one after all."""

    called: list[str] = dataclasses.field(default_factory=list)
    graphs: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    given_up: list[str] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def watched() -> Iterator[Seen]:
    seen = Seen()
    inline = region_calls._inline
    generate, partition, rewrite = Compilation._generate, Compilation.partition, Compilation.rewrite

    def own_generate(self: Any, gm: GraphModule, *args: Any) -> Any:
        seen.called += [str(call.args[1]) for call in calls(gm, INVOKE)]
        return generate(self, gm, *args)

    def own_partition(self: Any, joint: GraphModule, *args: Any, **kwargs: Any) -> Any:
        seen.graphs.append(("joint", text(joint)))
        halves = partition(self, joint, *args, **kwargs)
        seen.graphs += [(name, text(half)) for name, half in zip(("first half", "second half"), halves, strict=True)]
        return halves

    def own_rewrite(self: Any, gm: GraphModule, phase: str) -> GraphModule:
        seen.graphs.append((f"{phase} before", text(gm)))
        gm = rewrite(self, gm, phase)
        seen.graphs.append((phase, text(gm)))
        return gm

    def own_inline(*args: Any) -> None:
        try:
            inline(*args)
        except Exception as reason:
            seen.given_up.append(str(reason))
            raise

    with (
        torch.compiler.config.patch(force_disable_caches=True),  # passes see no graph whose code is in the cache
        mock.patch.object(region_calls, "_inline", own_inline),
        mock.patch.object(Compilation, "_generate", own_generate),
        mock.patch.object(Compilation, "partition", own_partition),
        mock.patch.object(Compilation, "rewrite", own_rewrite),
    ):
        yield seen


def step(build: Callable[[], Model], grad: bool = True, mp_policy: Any = None, **options: Any) -> tuple[Seen, list]:
    """Compile a model and run a step. Return what was seen, and outputs, gradients and buffers."""
    torch.compiler.reset()
    model, tokens = build(), torch.arange(6).view(2, 3) % 5
    policy = {} if mp_policy is None else {"mp_policy": mp_policy}
    for unit in (*model.layers, model) if model.has_units else (model,):
        fully_shard(unit, **policy)
    run = compiled(model, fullgraph=True, collectives_at_world_size_1=True, **options)
    torch.manual_seed(1)
    with watched() as seen, torch.set_grad_enabled(grad):
        out = run(tokens)
        outputs = [out] if isinstance(out, Tensor) else list(out)
        if grad:
            outputs[0].float().square().sum().backward()
    found = [each.detach() for each in outputs] + [torch.tensor([each.requires_grad for each in outputs])]
    found += [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    return seen, found + list(model.buffers())


def assert_same(build: Callable[[], Model], gives_up: bool = False, **kwargs: Any) -> Seen:
    """Compare a step with one whose layers are traced one by one."""
    (plain, expected), (seen, actual) = (step(build, trace_equal_layers_once=once, **kwargs) for once in (False, True))
    assert not plain.called
    for (name, before), (_, after) in zip(plain.graphs, seen.graphs, strict=True):
        assert before == after, name
    assert len(expected) == len(actual)
    assert bool(seen.given_up) == gives_up
    assert all(map(torch.equal, expected, actual))
    return seen


@pytest.mark.parametrize("name", variants(MODELS, "DropoutModel", "Tied", "OtherInTheMiddle"))
def test_graphs_and_gradients_are_the_same(name):
    with one_rank("cpu"):
        seen = assert_same(MODELS[name])
    assert bool(seen.called) == (name not in LEFT)


@pytest.mark.more
def test_mixed_precision():
    with one_rank("cpu"):
        assert assert_same(Model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)).called


def test_without_gradients():
    with one_rank("cpu"):
        seen = assert_same(Model, grad=False)
    assert len(seen.called) == 4
    assert [name for name, _ in seen.graphs] == ["inference before", "inference"]


@pytest.mark.more
def test_inductor():
    """Torch's own passes run on the joint graph before compiled_fsdp's passes see it."""
    with one_rank("cpu"):
        assert len(assert_same(Model, codegen="inductor").called) == 4


class OtherModel(Model):
    layer = Other


@pytest.mark.more
def test_code_from_the_cache(monkeypatch, tmp_path):
    """Torch's cache takes a graph with calls, and tells graphs apart that differ only in the body."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def hits(build: Callable[[], Model]) -> int:
        torch.compiler.reset()
        counters.clear()
        model = build()
        for unit in (*model.layers, model):
            fully_shard(unit)
        run = compiled(model, fullgraph=True, collectives_at_world_size_1=True, codegen="inductor")
        run(torch.arange(6).view(2, 3)).square().sum().backward()
        return counters["aot_autograd"]["autograd_cache_hit"]

    with one_rank("cpu"):
        assert [hits(build) for build in (Model, Model, OtherModel)] == [0, 1, 0]


@pytest.mark.parametrize("model", variants([Model, DropoutModel, OtherInTheMiddle, Losses], Losses))
def test_numbers_of_calls(model):
    """Each layer is a call: the border between two layers is where the fewest tensors pass."""
    with one_rank("cpu"):
        seen, _ = step(model)
    assert seen.called == ["equal_layer_0"] * sum(type(layer) is model.layer for layer in model().layers)


@torch.library.custom_op("test_equal_layers::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


BACKWARDS: list[str] = []


def _twice_backward(ctx: Any, gradient: Tensor) -> Tensor:
    BACKWARDS.append("traced")
    return gradient * 2


twice.register_autograd(_twice_backward)


class Counted(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + twice(self.inner(x))


class CountedModel(Model):
    layer = Counted


@pytest.mark.parametrize("once", [True, False])
def test_a_backward_is_traced_once(once):
    BACKWARDS.clear()
    with one_rank("cpu"):
        step(CountedModel, trace_equal_layers_once=once)
    assert len(BACKWARDS) == (1 if once else 4)


class Unused(Model):
    """A result of each layer requires a gradient, but gets none: it is used by an op without a derivative."""

    layer = Two

    def __init__(self) -> None:
        super().__init__(layers=8)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, losses = self.embedding(tokens), []
        for layer in self.layers:
            x, loss = layer(x)
            losses.append(loss)
        return self.head(self.norm(x)), torch.stack([loss > 0 for loss in losses])


@pytest.mark.more
def test_layers_that_cannot_be_put_back(caplog):
    """Torch would give a gradient of zeros to a result that gets none, so each layer is traced by itself."""
    with one_rank("cpu"), caplog.at_level(logging.DEBUG, "compiled_fsdp.compat.region_calls"):
        seen = assert_same(Unused, gives_up=True)
    assert seen.called
    assert "equal layers are traced one by one, because a layer has a result whose gradient nothing" in caplog.text


@pytest.mark.parametrize("part", variants(["aot_dispatch_autograd_graph", "create_aot_state"], "create_aot_state"))
def test_errors_of_a_trace_with_calls(part, caplog):
    """Everything begins again with the graph without calls, whatever torch raises."""
    from torch._functorch import aot_autograd

    places = vars(aot_autograd), aot_autograd.aot_stage1_graph_capture.__globals__
    place = next(each for each in places if part in each)
    of_torch, failed = place[part], []

    def fails_once(*args: Any, **kwargs: Any) -> Any:
        if not failed:
            failed.append(part)
            raise KeyError("a call")
        return of_torch(*args, **kwargs)

    caplog.set_level(logging.DEBUG, "compiled_fsdp.compat.region_calls")
    with one_rank("cpu"):
        _, expected = step(Model, trace_equal_layers_once=False)
        with mock.patch.dict(place, {part: fails_once}):
            seen, actual = step(Model)
    assert seen.called
    assert failed
    assert "equal layers are traced one by one, because KeyError was raised: 'a call'" in caplog.text
    assert all(map(torch.equal, expected, actual))


@pytest.mark.parametrize("codegen", variants(["aot_eager", "inductor"], "aot_eager"))
def test_errors_while_bodies_are_put_back(codegen):
    """The ranks decide on cached code once, although the graph is compiled twice."""
    take_cached, decisions = Compilation._take_cached, []

    def own_take_cached(*args: Any) -> Any:
        decisions.append(args)
        return take_cached(*args)

    with (
        one_rank("cpu"),
        mock.patch.object(region_calls, "_pairs", side_effect=ValueError("zip")),
        mock.patch.object(Compilation, "_take_cached", own_take_cached),
    ):
        assert assert_same(Model, gives_up=True, codegen=codegen).given_up == ["zip"]
    assert len(decisions) == (2 if codegen == "inductor" else 0)  # one for each of two compiles


def test_errors_of_a_decision_are_raised():
    with (
        one_rank("cpu"),
        mock.patch.object(Compilation, "_take_cached", side_effect=ValueError("a rank")) as decide,
        pytest.raises(Exception, match="a rank"),
    ):
        step(Model, codegen="inductor")
    assert decide.call_count == 1


def test_errors_while_layers_are_found(caplog):
    caplog.set_level(logging.DEBUG, "compiled_fsdp.compat.region_calls")
    with one_rank("cpu"), mock.patch("compiled_fsdp.compiler.equal_layers._move_reads", side_effect=KeyError("read")):
        assert not assert_same(Model).called
    assert "KeyError was raised: 'read'" in caplog.text


def test_errors_of_passes_are_raised():
    """The passes ask the other ranks, so they do not run again."""
    runs = []

    def partition(*args: Any, **kwargs: Any) -> Any:
        runs.append(args)
        raise ValueError("a pass")

    with (
        one_rank("cpu"),
        mock.patch.object(Compilation, "partition", partition),
        pytest.raises(Exception, match="a pass"),
    ):
        step(Model)
    assert len(runs) == 1


def test_graphs_inside_of_other_graphs_are_kept():
    with one_rank("cpu"):
        assert assert_same(Branches, grad=False).called


def test_modes_of_the_whole_program():
    """Layers with equal random numbers, and autocast of a device that this machine does not have."""
    from torch._functorch import config

    assert not region_calls.why_bodies_do_not_fit()
    with config.patch(functionalize_rng_ops=True):
        assert "functionalize_rng_ops" in region_calls.why_bodies_do_not_fit()
    torch.set_autocast_enabled("xpu", True)
    try:
        assert "autocast" in region_calls.why_bodies_do_not_fit()
    finally:
        torch.set_autocast_enabled("xpu", False)


def test_clones_of_the_model():
    """Only a clone that torch has added, because a gradient shares memory with an input, is left out."""
    graph = torch.fx.Graph()
    given = graph.placeholder("given")
    computed = graph.call_function(torch.ops.aten.sin.default, (given,))
    clones = [graph.call_function(torch.ops.aten.clone.default, (node,)) for node in (given, computed)]
    graph.output(tuple(clones))
    given.meta["val"], computed.meta["val"] = torch.ones(2), torch.ones(2)
    assert region_calls._clones_of_inputs(GraphModule({}, graph)) == {clones[0]: given}


@pytest.mark.more
@pytest.mark.parametrize("context", [lambda: torch.autocast("cpu", torch.bfloat16), torch.no_grad])
def test_modes_inside_of_a_model(context):
    class Switched(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            with context():
                x = super().forward(tokens)
            return self.head(x[..., :8].float())

    with one_rank("cpu"):
        assert not assert_same(Switched).called


@pytest.mark.more
def test_symbolic_sizes():
    with one_rank("cpu"):
        model = Model()
        for unit in (*model.layers, model):
            fully_shard(unit)
        with watched() as seen:
            torch.compile(model, backend="compiled_fsdp", dynamic=True, options={"codegen": "aot_eager"})(
                torch.arange(6).view(2, 3)
            )
    assert seen.graphs
    assert not seen.called
