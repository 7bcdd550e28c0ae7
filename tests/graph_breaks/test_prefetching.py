"""Across graph breaks: what is in flight, what is taken, what is dropped."""

import contextlib
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from compiled_fsdp import compiled_autograd, count_communication, explain, fully_shard
from compiled_fsdp.runtime import prefetcher
from compiled_fsdp.runtime.context import RUNTIME
from compiled_fsdp.runtime.prefetcher import _same_bits
from tests.harness import (
    Transformer,
    assert_same,
    batch,
    compiled,
    distributed,
    forward_backward,
    fsdp2,
    fsdp2_record,
    loss_of,
    shard,
    train,
    variants,
)
from tests.harness.fake import fake_group
from tests.harness.hardware import GROUPING, SCATTERING
from tests.harness.models import Broken, broken, small


class Doubling(torch.autograd.Function):
    """Someone's own function, which Dynamo is told not to trace."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@torch.compiler.disable
def doubled(x: torch.Tensor) -> torch.Tensor:
    return Doubling.apply(x)


@distributed(world_size=2)
def test_all_but_the_first_gather_are_in_flight(rank, world_size):
    """From the second step on, in forward and backward, and in evaluation; results equal FSDP2's."""
    model = shard(broken(blocks=4), fully_shard, reshard_after_forward=True)
    run = compiled(model)
    expected = fsdp2_record(broken(blocks=4), reshard_after_forward=True, steps=4)
    counts = []
    RUNTIME.prefetcher.close()  # an earlier test may have ended in the middle of a run

    def step(model, index):
        RUNTIME.prefetcher.counts.clear()
        loss = forward_backward(model, index)
        counts.append(dict(RUNTIME.prefetcher.counts))
        assert RUNTIME.idle
        return loss

    assert_same(train(run, step, steps=4), expected)
    gathers = 2 * 5  # of four blocks and the root, in forward and in backward
    assert counts[0] == {"late": gathers}
    assert counts[1:] == [{"late": 1, "launched": gathers - 1, "taken": gathers - 1}] * 3
    with torch.no_grad():
        for _ in range(3):
            RUNTIME.prefetcher.counts.clear()
            run(batch(rank, 0)[0])
    assert RUNTIME.prefetcher.counts == {"late": 1, "launched": 4, "taken": 4}


SHORT = {
    "_c10d_functional::all_gather_into_tensor_out": "gather",
    "_c10d_functional::all_to_all_single": "reduce",
    "_c10d_functional::reduce_scatter_tensor": "reduce",
    "_c10d_functional::wait_tensor": "wait",
    "aten::gelu": "forward",
    "aten::gelu_backward": "backward",
}


@distributed(world_size=2)
def test_the_next_gather_starts_before_this_layers_compute(rank, world_size):
    """As the profiler sees it: in backward also, where a layer's reduction is waited for after the next layer's
    compute."""
    run = compiled(shard(broken(blocks=4), fully_shard))
    for index in range(2):
        forward_backward(run, index)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        forward_backward(run, 2)
    events = sorted(profiled.events(), key=lambda event: event.time_range.start)
    order = [SHORT[event.name] for event in events if event.name in SHORT]
    short = [name for name, following in zip(order, [*order[1:], ""], strict=True) if name != following]
    assert " ".join(short).split(" backward ") == [
        # the root's and the first layer's; then each layer's before the forward of the one ahead
        "gather wait gather wait forward gather wait forward gather wait forward gather wait forward gather wait",
        "reduce gather wait",
        "reduce wait gather wait",
        "reduce wait",  # and the last layer's own gather, which is in flight since the graph before
        "reduce wait reduce wait",
    ]


@distributed(world_size=2)
@pytest.mark.parametrize("each", [0.0, 1.0])  # dear: grouped calls, or one flat bucket
def test_the_link_is_not_idle_until_it_is_known_whether_somebody_wrote(rank, world_size, each):
    run = compiled(shard(broken(blocks=4), fully_shard), hardware=replace(SCATTERING, each=each))
    for index in range(2):
        forward_backward(run, index)
    events = []
    ask, launch = prefetcher.PrefetchedGather.ask_if_stale, prefetcher.launch_all_gather

    def asked(*args):
        events.append("ask")
        answer = ask(*args)
        return lambda: events.append("answer") or answer()

    def launched(*args, **named):
        events.append("gather")
        return launch(*args, **named)

    with (
        mock.patch.object(prefetcher.PrefetchedGather, "ask_if_stale", asked),
        mock.patch.object(prefetcher, "launch_all_gather", launched),
    ):
        loss_of(run, rank, 2)
    # of the root and the first layer, then of what follows each layer
    assert events == ["gather", "gather", *["ask", "gather", "answer"] * 4]


class Inside(nn.Module):
    """A block with a branch on a value in its middle."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        block = self.block
        middle = block.up(block.norm2(x))
        if middle.detach().sum().item() > 1e9:
            middle = -middle
        return x + block.down(torch.nn.functional.gelu(middle))


def inside(blocks: int = 3) -> nn.Module:
    model = small(blocks=blocks)
    model.blocks = nn.ModuleList(Inside(block) for block in model.blocks)
    return model


BREAKS = {
    "print": lambda: broken(lambda model, number, x: print(end="") or x),
    "item": lambda: broken(lambda model, number, x: -x if x.detach().sum().item() > 1e9 else x),
    "function": lambda: broken(lambda model, number, x: doubled(x)),
    "inside": inside,
}


@distributed(world_size=2)
@pytest.mark.parametrize("kind", variants(BREAKS, "print", "inside"))
def test_kinds_of_breaks(rank, world_size, kind):
    """A print, a branch on a value, a function of one's own; between layers and inside of one."""
    model = shard(BREAKS[kind](), fully_shard)
    assert_same(train(compiled(model)), fsdp2_record(BREAKS[kind]()))
    explanation = explain(model)
    assert explanation.graph_breaks
    assert all(__file__ in where or "harness" in where for _, where in explanation.graph_breaks)
    assert str(explanation).count("graph break: ") == len(explanation.graph_breaks)
    assert all(graph.is_fragment for graph in explanation.graphs)


@pytest.mark.parametrize("breaks", variants(["between", "inside"], "between"))
def test_compiled_graphs_do_not_grow_with_depth(breaks):
    """A model of 24 layers has as many as one of 4."""

    def graphs(blocks: int) -> int:
        with fake_group(2):
            model = shard(broken(blocks=blocks) if breaks == "between" else inside(blocks), fully_shard)
            loss_of(compiled(model), 0, 0).backward()
            return len(explain(model).graphs)

    assert graphs(24) == graphs(4) > 0


UPDATES = {
    "all ranks write": lambda rank, param: param.to_local().mul_(1.5),
    "one rank writes": lambda rank, param: param.to_local().mul_(1.5 if rank else 1.0),
    "one rank writes .data": lambda rank, param: param.to_local().data.add_(0.25 if rank else 0.0),
}


@distributed(world_size=2)
@pytest.mark.parametrize("update", variants(UPDATES, "one rank writes"))
@pytest.mark.parametrize("grouped", variants([False, True], False))
def test_written_while_its_gather_is_in_flight(rank, world_size, update, grouped):
    """A parameter of the next block, between two layers; by all ranks or by one alone."""

    held: dict[int, list[nn.Parameter]] = {}

    def write(model, number, x):
        if number == 1:
            with torch.no_grad():
                for param in held[id(model)]:
                    UPDATES[update](rank, param)
        return x

    ours, theirs = shard(broken(write), fully_shard), fsdp2(broken(write))
    for model in (ours, theirs):
        held[id(model)] = list(model.blocks[1].parameters())  # DTensors, as they are outside of forward
        assert all(isinstance(param, DTensor) for param in held[id(model)])
    RUNTIME.prefetcher.counts.clear()
    assert_same(train(compiled(ours, hardware=GROUPING if grouped else "cpu"), steps=4), train(theirs, steps=4))
    # every step but the first; of a grouped gather gloo may read a shard after it was written, and sends that
    stale = RUNTIME.prefetcher.counts["stale"]
    assert stale <= 3 if grouped else stale == 3
    assert RUNTIME.idle


@distributed(world_size=2)
def test_steps_of_optimizers_and_loading(rank, world_size):
    """Between steps, by every way that changes no version counter."""

    def sgd_on_data(model):
        with torch.no_grad():
            for param in model.parameters():
                param.to_local().data.sub_(param.grad.to_local(), alpha=0.1)

    def load(model):
        state = {name: 0.5 * value for name, value in model.state_dict().items()}
        model.load_state_dict(state)

    updates = {
        "foreach": lambda model: torch.optim.AdamW(model.parameters(), foreach=True).step(),
        "fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True).step(),
        "data": sgd_on_data,
        "load": load,
    }
    # None would leave FSDP2's root full after an evaluation, with parameters of which zero_grad() zeroes nothing
    reshard = {"reshard_after_forward": True}
    ours, theirs = shard(broken(), fully_shard, **reshard), fsdp2(broken(), **reshard)
    run = compiled(ours)
    for index, update in enumerate([*updates.values()] * 2):
        losses = []
        for call, model in ((run, ours), (theirs, theirs)):
            model.zero_grad()
            losses.append(forward_backward(call, index))
            update(model)
            with torch.no_grad():
                losses.append(call(batch(rank, index)[0]).sum())  # evaluation in between
        # not bit for bit: where a fused kernel's vectors begin depends on the memory's alignment
        torch.testing.assert_close(losses[:2], losses[2:], rtol=1e-5, atol=0)


@distributed(world_size=2)
@pytest.mark.parametrize("recheck", variants([True, False], True))
def test_grouped_calls_are_in_flight_as_they_are(rank, world_size, recheck):
    """Where copies are dear nothing between the graphs is packed: same results, and the same is taken from flight."""
    model = shard(broken(blocks=3), fully_shard, reshard_after_forward=True)
    run = compiled(model, hardware=replace(SCATTERING, each=0.0), recheck_prefetched=recheck)
    RUNTIME.prefetcher.close()
    RUNTIME.prefetcher.counts.clear()
    with count_communication() as volume:
        assert_same(train(run, steps=3), fsdp2_record(broken(blocks=3), reshard_after_forward=True, steps=3))
    forms = {bucket.form for graph in explain(model).graphs for bucket in graph.plan.launches}
    assert forms <= {"coalesced", "single"}
    assert "coalesced" in forms
    assert RUNTIME.prefetcher.counts["taken"] == 2 * 7  # all but the first, of four in forward and four in backward
    assert RUNTIME.idle
    # each tensor of a block is a collective of its own on gloo; the root's are read in eager code, as one
    in_blocks = sum(len(list(block.parameters())) for block in model.blocks)
    for kind, passes in {"gather": 2, "reduce": 1}.items():
        assert volume[kind].tensors == 3 * passes * len(list(model.parameters()))
        assert volume[kind].launches == 3 * passes * (in_blocks + 1)


@distributed(world_size=2)
def test_trusting_that_nobody_writes(rank, world_size):
    """`recheck_prefetched=False` compares nothing, which is one collective less for each graph."""

    def reductions(**options) -> int:
        """How many all-reduces the third step has; gloo's reduce-scatter is one, and a graph's reductions are
        all-to-alls."""
        run = compiled(shard(broken(), fully_shard), **options)
        for index in range(2):
            forward_backward(run, index)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            forward_backward(run, 2)
        return [event.name for event in profiled.events()].count("gloo:all_reduce")

    # both blocks' forwards, and the backward that comes first: what is in flight since its own backward is not asked
    # about
    assert reductions() - reductions(recheck_prefetched=False) == 3


@distributed(world_size=2)
def test_exceptions_and_other_ways_through_the_model(rank, world_size):
    """An exception between two layers, in forward and in backward; a forward in another's; a layer that is left out;
    two forwards in turn. What was expected did not come: nothing is lost or left over, and results are FSDP2's."""
    plan = {"raise": False, "order": (0, 1, 2)}

    class Way(Broken):
        def forward(self, tokens):
            x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
            for number in plan["order"]:
                x = self.blocks[number](aside(x, number))
            return self.head(self.norm(x))

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if plan["raise"] == "backward":
                raise ValueError("backward")
            return grad

    @torch.compiler.disable
    def aside(x, number):
        if number == 2 and plan["raise"] == "forward":
            raise ValueError("forward")
        return Failing.apply(x) if number == 1 else x

    ours, theirs = shard(small(blocks=3, cls=Way), fully_shard), fsdp2(small(blocks=3, cls=Way))
    run = compiled(ours)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (ours, theirs)]
    for index, (fails, order) in enumerate(
        [(False, (0, 1, 2)), (False, (0, 1, 2)), ("forward", (0, 1, 2)), (False, (0, 1, 2)), (False, (2, 1, 0)),
         (False, (0, 2)), ("backward", (0, 1, 2)), (False, (0, 1, 2)), (False, (1, 1, 1)), (False, (0, 1, 2))]
    ):  # fmt: skip
        losses = []
        plan["order"] = order
        for call, model, optimizer in ((run, ours, optimizers[0]), (theirs, theirs, optimizers[1])):
            plan["raise"] = fails
            if fails:
                with pytest.raises(ValueError, match=fails):
                    forward_backward(call, index)
                model.reset_iter_state() if hasattr(model, "reset_iter_state") else None
                model.zero_grad()
                if model is theirs:  # which is of no more use
                    state = theirs.state_dict()
                    theirs = fsdp2(small(blocks=3, cls=Way))
                    theirs.load_state_dict(state)
                    optimizers[1] = torch.optim.AdamW(theirs.parameters(), lr=0.01)
                    optimizers[0] = torch.optim.AdamW(ours.parameters(), lr=0.01)
                continue
            losses.append(forward_backward(call, index))
            optimizer.step()
            optimizer.zero_grad()
        if not fails:
            # the gradients of a layer's three forwards are added in another order, so the step after them is near
            torch.testing.assert_close(*losses, rtol=1e-5 if index == 9 else 0, atol=0)
            assert RUNTIME.idle


@distributed(world_size=2)
def test_ranks_whose_batches_differ(rank, world_size):
    """One rank compiles again alone while gathers are in flight."""
    sizes = [(3, 3, 3, 3), (3, 5, 7, 4)][rank]

    def step(model, index):
        loss = loss_of(model, rank, index, size=sizes[index])
        loss.backward()
        return loss.detach()

    assert_same(train(compiled(shard(broken(), fully_shard)), step, steps=4), train(fsdp2(broken()), step, steps=4))
    assert RUNTIME.idle


@pytest.mark.more
@distributed(world_size=2)
def test_with_inductor(rank, world_size):
    """The second step's loss and gradients, whose gathers were in flight; without and with compiled autograd."""
    theirs = fsdp2(broken(blocks=1))
    for index in range(2):
        theirs.zero_grad()
        expected = forward_backward(theirs, index)
    for around in (contextlib.nullcontext, lambda: compiled_autograd(codegen="inductor")):
        model = shard(broken(blocks=1), fully_shard)
        run = compiled(model, codegen="inductor")
        for index in range(2):
            model.zero_grad()
            RUNTIME.prefetcher.counts.clear()
            loss = loss_of(run, rank, index)
            with around():
                loss.backward()
        assert RUNTIME.prefetcher.counts["taken"] > 0
        torch.testing.assert_close(loss.detach(), expected, rtol=1e-6, atol=0)
        for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
            mine, right = ours.grad.full_tensor(), other.grad.full_tensor()
            assert (mine - right).abs().max() <= 1e-5 * right.abs().max()


@distributed(world_size=2)
def test_a_module_on_both_sides_of_a_break(rank, world_size):
    """With an optimizer in backward: one hook call for each parameter and step, with the whole gradient."""

    class Twice(Transformer):
        def forward(self, tokens):
            x = self.embedding(tokens)
            for _ in range(2):
                torch._dynamo.graph_break()
                x = self.blocks[0](x)
            return self.head(self.norm(x))

    calls: dict[str, int] = {}

    def in_backward(model):
        for name, param in model.named_parameters():
            optimizer = torch.optim.SGD([param], lr=0.1)

            def step(p, optimizer=optimizer, name=name):
                optimizer.step()
                optimizer.zero_grad()
                calls[name] = calls.get(name, 0) + (model is ours)

            param.register_post_accumulate_grad_hook(step)
        return model

    ours = shard(small(cls=Twice), fully_shard)
    theirs = in_backward(shard(small(cls=Twice), torch_fully_shard))
    run = compiled(in_backward(ours))
    for index in range(3):
        torch.testing.assert_close(forward_backward(run, index), forward_backward(theirs, index), rtol=1e-6, atol=0)
    used = {name for name, _ in ours.named_parameters() if "position" not in name}
    assert {name: count for name, count in calls.items() if count} == dict.fromkeys(used, 3)


def test_gradients_of_inputs_leave_parameters_alone():
    """What graphs have left in flight for gates that never come is dropped."""
    with fake_group(2):
        model = shard(broken(), fully_shard)
        run = compiled(model)
        x = torch.randn(2, 16, 16, requires_grad=True)
        model.embedding.register_forward_hook(lambda module, args, output: output + x)
        for _ in range(2):
            (grad,) = torch.autograd.grad(run(batch(0, 0, size=2)[0]).sum(), x)
            assert grad.shape == x.shape
            assert all(param.grad is None for param in model.parameters())
            assert RUNTIME.idle


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.uint8])
def test_same_bits(dtype):
    """Of any length, from any place in memory; every element counts."""
    for first, numel in ((0, 8), (0, 7), (1, 8), (3, 5), (0, 1), (0, 0)):
        a = torch.arange(16).to(dtype).narrow(0, first, numel)
        b = a.clone()
        assert _same_bits(a, b)
        for place in range(numel):
            old, b[place] = b[place].clone(), 100
            assert not _same_bits(a, b)
            b[place] = old
    if dtype.is_floating_point:
        nan, zero = torch.full((4,), torch.nan, dtype=dtype), torch.zeros(4, dtype=dtype)
        assert _same_bits(nan, nan.clone())
        assert not _same_bits(zero, -zero)
