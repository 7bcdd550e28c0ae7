"""Compute that layers repeat becomes a function."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor
from torch._inductor import graph as lowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_fsdp import fully_shard
from compiled_fsdp.passes.cost.fusion import mark_memory
from compiled_fsdp.passes.graph import aten, calls
from compiled_fsdp.passes.share import share
from tests.harness import compiled
from tests.harness.fake import fake_group
from tests.passes.graphs import context, launch_sum, wait

INVOKE = torch.ops.higher_order.invoke_subgraph


def shared(function: Callable[..., Any], *inputs: Tensor, tracing: str = "fake") -> tuple[GraphModule, GraphModule]:
    """Return the graph of a Python function before the pass ``share``, and after it."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(each) for each in inputs]
    if tracing == "symbolic":
        before, after = (make_fx(function, tracing_mode="symbolic")(*inputs) for _ in range(2))
    else:
        before, after = (make_fx(function)(*fakes) for _ in range(2))
    return before, share(after, context([]))


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Nineteen calls without views. The last one is a product, so that nothing is fused across a layer's end."""
    y = x @ w.t()
    for _ in range(5):
        y = torch.tanh(y * 2 + b)
    return (x + y / 3) @ w


def layers(x: Tensor, *parameters: Tensor) -> Tensor:
    for w, b in zip(parameters[::2], parameters[1::2], strict=True):
        x = layer(x, w, b)
    return x


def tensors(count: int, width: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(3, width, generator=generator)]
    for _ in range(count):
        found += [torch.randn(width, width, generator=generator), torch.randn(width, generator=generator)]
    return found


def same(before: GraphModule, after: GraphModule, inputs: list[Tensor]) -> bool:
    expected, actual = before(*inputs), after(*inputs)
    if isinstance(expected, Tensor):
        expected, actual = [expected], [actual]
    return all(map(torch.equal, expected, actual))


def test_equal_layers_call_one_function():
    inputs = tensors(3)
    before, after = shared(layers, *inputs)
    assert_expected_inline(
        "\n".join(str(node) + " = " + ", ".join(map(str, node.args)) for node in after.graph.nodes if node.args),
        """\
invoke_subgraph = repeated_0, repeated_0, arg0_1, arg1_1, arg2_1
getitem = invoke_subgraph, 0
invoke_subgraph_1 = repeated_1, repeated_0, getitem, arg3_1, arg4_1
getitem_1 = invoke_subgraph_1, 0
invoke_subgraph_2 = repeated_2, repeated_0, getitem_1, arg5_1, arg6_1
getitem_2 = invoke_subgraph_2, 0
output = getitem_2""",
    )
    assert len(calls(after, INVOKE)) == 3
    assert same(before, after, inputs)


def test_one_layer_stays():
    inputs = tensors(1)
    before, after = shared(layers, *inputs)
    assert not calls(after, INVOKE)
    assert same(before, after, inputs)


def test_launches_and_waits_stay_outside():
    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        for w, b in zip(parameters[::2], parameters[1::2], strict=True):
            summed = launch_sum(b)
            x = layer(x, w, b)
            x = x + wait(summed)
        return x

    _, after = shared(function, *tensors(3))
    names = [each.target.name().split("::")[-1] for each in after.graph.nodes if hasattr(each.target, "name")]
    assert [name for name in names if "invoke" in name or "all_reduce" in name or "wait" in name] == [
        *("all_reduce", "invoke_subgraph", "wait_tensor"),
    ] * 3


def test_a_result_that_only_one_layer_returns():
    """The second layer's function has another result, so it is another function, or none."""
    inputs = tensors(4)

    def function(x: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        for number, (w, b) in enumerate(zip(parameters[::2], parameters[1::2], strict=True)):
            y = x @ w.t()
            for _ in range(5):
                y = torch.tanh(y * 2 + b)
            if number == 1:
                kept = y.t()
            x = x + y / 3
        return x, kept

    before, after = shared(function, *inputs)
    assert len(calls(after, INVOKE)) >= 2
    assert same(before, after, inputs)


def test_other_wiring_is_another_function():
    inputs = tensors(4)

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        for number, (w, b) in enumerate(zip(parameters[::2], parameters[1::2], strict=True)):
            y = z = x @ w.t()
            for _ in range(6):
                y, z = torch.tanh(y + b), y
            x = y - z if number % 2 else z - y  # the same call, on the same two tensors
        return x

    before, after = shared(function, *inputs)
    assert len({node.args[1] for node in calls(after, INVOKE)}) == 2
    assert same(before, after, inputs)


def test_other_constants_are_another_function():
    """2 and 2.0 are different, although their products are equal here."""
    inputs = tensors(4)

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        for number, (w, b) in enumerate(zip(parameters[::2], parameters[1::2], strict=True)):
            y = x @ w.t()
            for _ in range(5):
                y = torch.tanh(y * (2 if number < 2 else 2.0) + b)
            x = x + y / 3
        return x

    before, after = shared(function, *inputs)
    assert [node.args[1] for node in calls(after, INVOKE)] == ["repeated_1"] * 2 + ["repeated_0"] * 2
    assert [re.findall(r", (2|2\.0)\)", body.code)[0] for _, body in after.named_children()] == ["2.0", "2"]
    assert same(before, after, inputs)


def test_several_results_and_views_of_them():
    inputs = tensors(3)

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        parts: list[Tensor] = []
        for w, b in zip(parameters[::2], parameters[1::2], strict=True):
            y = layer(x, w, b)
            values, _ = torch.sort(y, dim=1)
            mean, deviation = torch.var_mean(values, dim=1, keepdim=True)
            first, second = values.t().split(2)
            x = (torch.cat([first, second]).t() * mean + deviation) @ w
            parts.append(first.t()[:1])  # a view, which is used outside
        return torch.cat([x, *(part.repeat(1, 2) for part in parts)])

    before, after = shared(function, *inputs)
    assert len(calls(after, INVOKE)) == 3
    assert same(before, after, inputs)


def test_random_numbers_stay_in_the_graph():
    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        for w, b in zip(parameters[::2], parameters[1::2], strict=True):
            x = F.dropout(layer(x, w, b), 0.5)
        return x

    _, after = shared(function, *tensors(3))
    drawn = [node for node in after.graph.nodes if "bernoulli" in str(node.target) or "dropout" in str(node.target)]
    assert len(drawn) == 3
    assert len(calls(after, INVOKE)) == 3


def test_a_write_stays_in_the_graph():
    inputs = tensors(3)

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        for w, b in zip(parameters[::2], parameters[1::2], strict=True):
            x = layer(x, w, b)
            b.add_(1)
        return x

    before, after = shared(function, *inputs)
    assert len(calls(after, INVOKE)) == 3
    others = [each.clone() for each in inputs]
    assert torch.equal(before(*inputs), after(*others))
    assert all(map(torch.equal, inputs, others))


def test_symbolic_sizes_stay():
    _, after = shared(layers, *tensors(3), tracing="symbolic")
    assert not calls(after, INVOKE)


def test_a_border_is_where_nothing_would_be_fused():
    """A function ends with a product, and not between two of the pointwise calls that Inductor makes one kernel of."""

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        for number, (w, b) in enumerate(zip(parameters[::2], parameters[1::2], strict=True)):
            x = layer(x, w, b) @ w
            x = (torch.tanh(x) * (2 + number)).sin()
        return x

    inputs = tensors(4)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(each) for each in inputs]
    before, after = (make_fx(function)(*fakes) for _ in range(2))
    mark_memory(after)
    share(after, context([]))
    (name,) = {node.args[1] for node in calls(after, INVOKE)}
    results = getattr(after, name).graph.output_node().all_input_nodes
    assert [str(result.target) for result in results] == ["aten.mm.default"]
    assert same(before, after, inputs)


# ---- code ------------------------------------------------------------------------------------------------------------
class Layer(nn.Module):
    """Its backward needs what forward saves more than once, and the gradient of its input is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.gate, self.down = (
            nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        gated = F.silu(self.gate(y)) * self.up(y)
        return x + self.down(gated * torch.sigmoid(gated)).tanh() * y


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(5))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        first = x = x * scale
        for layer in self.layers:
            x = layer(x)
        return (x * first).sum()  # the first input is needed until the end


def grads(*without: str) -> tuple[list[Tensor], Counter[str]]:
    """The gradients of two steps with Inductor, and how many functions each phase has."""
    torch.manual_seed(0)
    found, functions = [], Counter()

    def note(gm: GraphModule, ctx: Any) -> GraphModule:
        functions[ctx.phase] += len(calls(share(gm, ctx), INVOKE))
        return gm

    noting = mock.patch("compiled_fsdp.compiler.compilation.INDUCTOR_PASSES", (note,) * (not without))
    with fake_group(1), noting, torch.compiler.config.patch(force_disable_caches=True):
        model = Layers()
        for layer in model.layers:
            fully_shard(layer)
        run = compiled(fully_shard(model), codegen="inductor")
        x, scale = torch.randn(8, 16, requires_grad=True), torch.randn(8, 16, requires_grad=True)
        for _ in range(2):
            loss = run(x, scale)
            loss.backward()
            found += [loss.detach(), x.grad.clone(), scale.grad.clone()]
            found += [parameter.grad.to_local().clone() for parameter in model.parameters()]
    return found, functions


@pytest.mark.more
def test_inductors_code_computes_the_same():
    """In forward and in backward, where Inductor may write over what forward has saved, but not inside of functions."""
    actual, functions = grads()
    expected, _ = grads("share")
    assert functions["forward"] >= 3
    assert functions["backward"] >= 3
    for mine, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_functions_may_not_overwrite_what_they_are_given():
    """Torch counts their inputs as the graph's, some of which a backward may overwrite."""
    of_graphs: list[Any] = []
    of_functions: list[Any] = []
    find, run = lowering.get_donated_idxs, lowering.SubgraphLowering.run

    def found() -> Any:
        of_graphs.append(find())
        return of_graphs[-1]

    def noting(self: Any, *inputs: Any) -> Any:
        of_functions.append(self.bw_donated_idxs)
        return run(self, *inputs)

    with (
        mock.patch.object(lowering, "get_donated_idxs", found),
        mock.patch.object(lowering.SubgraphLowering, "run", noting),
    ):
        grads()
    assert any(of_graphs)
    assert of_functions
    assert not any(of_functions)


def test_a_graph_under_a_budget_stays():
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(each) for each in tensors(3)]
    gm = make_fx(layers)(*fakes)
    assert not calls(share(gm, context([], budget=10**9)), INVOKE)


def test_a_view_of_something_symbolic():
    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        return layers(x[:1] + 1, *parameters)

    _, after = shared(function, *tensors(3), tracing="symbolic")
    assert not calls(after, INVOKE)


def test_a_function_may_return_what_cannot_be_a_copy():
    """A rotation's ``cat`` and a cast have another size or type than what they are given."""

    def function(x: Tensor, *parameters: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        for w, b in zip(parameters[::2], parameters[1::2], strict=True):
            x = layer(x, w, b)
            first, second = x.chunk(2, dim=1)
            found += [torch.cat((first * 2 - second, second * 2 + first), dim=1), x.bfloat16()]
            x = found[-2] @ w
        return [*found, x]

    inputs = tensors(3)
    before, after = shared(function, *inputs)
    assert not calls(after, aten.cat.default, aten._to_copy.default)
    assert same(before, after, inputs)


def test_a_function_does_not_return_a_copy():
    """Inductor would remove it, and not know that two of its names are one tensor."""

    def function(x: Tensor, *parameters: Tensor) -> list[Tensor]:
        found = []
        for w, b in zip(parameters[::2], parameters[1::2], strict=True):
            x = layer(x, w, b)
            found.append(x.clone())
            x = (x.clone() + 1) @ w
        return [x, *found]

    inputs = tensors(4)
    before, after = shared(function, *inputs)
    assert len(calls(after, INVOKE)) >= 3
    for _, body in after.named_children():
        results = body.graph.output_node().all_input_nodes
        assert all("clone" not in str(result.target) for result in results)
    assert same(before, after, inputs)
