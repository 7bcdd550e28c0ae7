"""A working copy of the parameters inside each node, which stays over microbatches. Two nodes of two ranks."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from compiled_fsdp import MixedPrecisionPolicy, WirePolicy, compiled_autograd, count_communication, explain, fully_shard
from tests.harness import compiled, distributed
from tests.harness.cases import variants
from tests.harness.symm_mem import symm_mem_from_now_on

OTHER_CODE = ("checkpoint", "break", "eager", "compiled autograd")
# Inductor of torch 2.11 does not know collectives by copy engines
KINDS_OF_CODE = (*OTHER_CODE, "kept", *(["copy engines"] if torch.__version__ >= "2.13" else []))


class Layers(nn.Sequential):
    """Linear layers; seven rows do not divide by four ranks. The middle one may be checkpointed, or end in a break."""

    def __init__(self, middle: str = "") -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 8)), nn.Linear(8, 8))
        self.middle = middle

    def forward(self, x):
        x = self[0](x)
        x = checkpoint(self[1], x, use_reentrant=False) if self.middle == "checkpoint" else self[1](x)
        if self.middle == "break":
            torch._dynamo.graph_break()
        return self[2](x)


def sharded(middle: str = "", **options) -> nn.Module:
    model = Layers(middle)
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, reshard_after_forward=True)


def loss_of(call, micro):
    return call(torch.full((2, 8), 0.1 + dist.get_rank() + micro)).square().mean()


def accumulate(model, call, copies=(2, 2, True), sync=(True, True, True)):
    """A step of one microbatch for each of `copies`. Returns its losses, and the bytes that gathers have sent."""
    losses, sent = [], []
    for micro, (copy, syncs) in enumerate(zip(copies, sync, strict=True)):
        model.set_requires_gradient_sync(syncs)
        model.set_reshard_after_backward(copy)
        with count_communication() as volume:
            losses.append(loss_of(call, micro))
            losses[-1].backward()
        sent.append(volume["gather"].sent)
    return [loss.detach() for loss in losses], sent


def train(model, call, steps=2, **how):
    """Steps of SGD. Returns all losses and gradients, and the bytes that gathers have sent in the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        losses, sent = accumulate(model, call, **how)
        found += [*losses, *(param.grad.to_local().clone() for param in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return found, sent


def retained(model):
    return [p.retained for unit in model._fsdp_unit.tree_units() for p in unit.parameters]


def assert_equal(found, expected):
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@distributed(world_size=4)
@pytest.mark.parametrize("codegen", ["aot_eager", pytest.param("inductor", marks=pytest.mark.more)])
def test_only_the_first_forward_gathers_between_nodes(rank, world_size, codegen):
    """The same bits as without a copy. The copy is half of each parameter, and goes with the last backward."""
    model, plain = sharded(), sharded()
    found, sent = train(model, compiled(model, bucket="module", codegen=codegen))
    assert retained(model) == [None] * 8
    expected, all_sent = train(plain, compiled(plain, bucket="module", codegen=codegen), copies=(True,) * 3)
    assert_equal(found, expected)
    places = {
        (graph.phase, bucket.group_id)
        for graph in explain(model).graphs
        for bucket in graph.plan.launches
        if bucket.kind == "gather"
    }
    assert places == {("forward", 0), ("forward", 1), ("backward", 1)}
    # a ring of 4 ranks sends 3/4 of a bucket, a ring of 2 half of it; the first forward gathers over 4 ranks
    assert sent[1] == sent[2] == all_sent[1] * 2 // 3
    assert sent[1] < sent[0] < all_sent[0]


@distributed(world_size=4)
def test_writes_and_other_calls_while_there_is_a_copy(rank, world_size):
    """A step and a loaded state dict are seen; an evaluation uses the copy; `unshard()` and False replace it."""
    model, plain = sharded(), sharded()
    calls = compiled(model, bucket="module"), compiled(plain, bucket="module")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]

    def same(micro, *, grad=True):
        losses = []
        for call in calls:
            with torch.set_grad_enabled(grad):
                losses.append(loss_of(call, micro))
            if grad:
                losses[-1].backward()
        assert torch.equal(*losses)
        if grad:
            assert_equal(*([p.grad.to_local() for p in m.parameters()] for m in (model, plain)))

    model.set_reshard_after_backward(2)
    same(0)
    parts = retained(model)
    assert [part.numel() for part in parts] == [32, 4, 32, 4, 28, 4, 32, 4]
    same(1, grad=False)
    same(1)
    assert all(now is before for now, before in zip(retained(model), parts, strict=True))
    for optimizer in optimizers:
        optimizer.step()  # with the number still set
    assert retained(model) == [None] * 8
    same(2)
    state = {name: value * 2 for name, value in plain.state_dict().items()}
    assert_equal(*([v.to_local() for v in m.state_dict().values()] for m in (model, plain)))
    for m in (model, plain):
        m.load_state_dict(state)
    same(3)
    model[0].unshard()
    same(4)
    same(5)
    model.set_reshard_after_backward(False)
    same(6)
    assert [full.numel() for full in retained(model)] == [64, 8, 56, 7, 56, 8, 64, 8]
    model.set_reshard_after_backward(4)  # all ranks: True
    same(7)
    assert retained(model) == [None] * 8


@distributed(world_size=4)
@pytest.mark.parametrize("middle", variants(KINDS_OF_CODE, "checkpoint"))
def test_a_copy_in_other_code(rank, world_size, middle):
    """The same bits as without a copy; uncompiled code has none, and gathers over all ranks.

    Copy engines send all groups' collectives on one stream, also across a break.
    """
    found, sent, options = [], [], {}
    if middle == "copy engines":
        middle, options = "break", {"transport": "symm_mem"}
        symm_mem_from_now_on()
    for copy in (2, True):
        model = sharded(middle, **({"reshard_after_forward": False} if middle == "kept" else {}))
        call = model if middle == "eager" else compiled(model, bucket="module", **options)
        how = compiled_autograd() if middle == "compiled autograd" else torch.enable_grad()
        with how:
            values, gathered = train(model, call, copies=(copy, copy, True), sync=(False, False, True))
        found.append(values)
        sent.append(gathered)
        assert retained(model) == [None] * 8
    assert_equal(*found)
    if middle == "eager":
        assert sent[0] == sent[1]
    else:
        assert sent[0][1] < sent[1][1]


@distributed(world_size=4)
def test_numbers_of_ranks_that_do_not_fit(rank, world_size):
    model = sharded()
    with pytest.raises(
        ValueError, match=r"should be a factor of the number of shards, which is 4 for '0.weight', not 3"
    ):
        model.set_reshard_after_backward(3)
    model.set_reshard_after_backward(2)
    with pytest.raises(Exception, match=r"set_reshard_after_backward\(<int>\) need the pass 'lower' of the backend"):
        loss_of(torch.compile(model, backend="aot_eager"), 0)  # torch's own


def in_two(grads, copies=2):
    """The documented order: the average in each node per microbatch, their sum, then the average over the nodes."""
    world, sums = dist.get_world_size(), []
    for grad in grads:  # [microbatches, ...], of this rank
        everyone = [torch.empty_like(grad) for _ in range(world)]
        dist.all_gather(everyone, grad)
        nodes = [(everyone[first] + everyone[first + 1]) / copies for first in range(0, world, copies)]
        sums.append(sum(functools.reduce(torch.add, node) for node in nodes) / len(nodes))
    return sums


@distributed(world_size=4)
@pytest.mark.parametrize("middle", variants(["", *OTHER_CODE], ""))
def test_gradients_are_reduced_in_the_node_first(rank, world_size, middle):
    """Each microbatch reduces over two ranks, which keep half of each sum; the last one reduces the sums."""
    model, alone = sharded(middle), Layers()
    call = model if middle == "eager" else compiled(model, bucket="module")
    how = compiled_autograd if middle == "compiled autograd" else torch.enable_grad
    for step in range(2):
        sent = []
        for micro in range(3):
            model.set_reshard_after_backward(True if micro == 2 else 2)
            model.set_requires_all_reduce(micro == 2)
            with how(), count_communication() as volume:
                loss_of(call, micro + step).backward()
            sent.append((volume["reduce"].bytes, volume["reduce"].sent))
            if micro < 2:
                units = model._fsdp_unit.tree_units()
                parts = [p.grads.partial_reduce_output.numel() for unit in units for p in unit.parameters]
                assert parts == [32, 4, 32, 4, 28, 4, 32, 4]
        grads = [
            torch.stack(of_one)
            for of_one in zip(
                *(torch.autograd.grad(loss_of(alone, micro + step), tuple(alone.parameters())) for micro in range(3)),
                strict=True,
            )
        ]
        for param, expected in zip(model.parameters(), in_two(grads), strict=True):
            full = param.grad.full_tensor()
            if middle == "compiled autograd":  # Inductor computes the derivative of tanh, and rounds otherwise
                torch.testing.assert_close(full, expected, rtol=1e-6, atol=1e-8)
            else:
                assert torch.equal(full, expected)
        model.zero_grad()
    # 280 padded elements: all of them inside the node, and a half of them across; a ring of two sends half
    assert sent == [(1120, 560), (1120, 560), (1680, 840)]


@distributed(world_size=4)
def test_gradients_that_become_pending_in_other_ways(rank, world_size):
    """Full gradients, then those of a node, then all; and a number that changes while gradients are pending."""
    for number, calls in enumerate(["gn-", "nf-", "ngn-", "n3-"]):
        model, alone = sharded(), Layers()
        model.set_reshard_after_backward(2)
        expected = 0
        for micro, call in enumerate(calls):
            if call == "f":
                model.set_reshard_after_backward(False)
            if call == "3":
                model.set_reshard_after_backward(True)
                model.set_reshard_after_backward(2)
            model.set_requires_gradient_sync(call != "g")
            model.set_requires_all_reduce(call == "-")
            loss_of(model, micro + number).backward()
            expected = expected + loss_of(alone, micro + number)
        assert all(not p.grads.waits for unit in model._fsdp_unit.tree_units() for p in unit.parameters)
        expected.backward()
        for param, plain in zip(model.parameters(), alone.parameters(), strict=True):
            dist.all_reduce(plain.grad)
            torch.testing.assert_close(param.grad.full_tensor(), plain.grad / world_size)


@distributed(world_size=4)
def test_encoded_gradients_are_not_reduced_in_two_parts(rank, world_size):
    model = sharded(wire_policy=WirePolicy(reduce="int8"))
    model.set_reshard_after_backward(2)
    with pytest.raises(NotImplementedError, match=r"gradients of '0.weight' are encoded"):
        model.set_requires_all_reduce(False)


@distributed(world_size=4)
@pytest.mark.parametrize("kind", ["columns", "float16"])
def test_the_last_backward_reduces_between_nodes_in_its_graph(rank, world_size, kind):
    """Compute hides it there. Gradients have the bits of uncompiled code, also in other dimensions and dtypes."""

    def built():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        options = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)} if kind == "float16" else {}
        if kind == "columns":
            options["shard_placement_fn"] = lambda param: Shard(param.ndim - 1)
        for layer in model:
            fully_shard(layer, **options)
        return fully_shard(model, **options)

    models = [built(), built()]
    for model, call in zip(models, [compiled(models[0], bucket="module"), models[1]], strict=True):
        for micro in range(3):
            model.set_reshard_after_backward(True if micro == 2 else 2)
            model.set_requires_all_reduce(micro == 2)
            loss_of(call, micro).backward()
    assert_equal(*([param.grad.to_local() for param in model.parameters()] for model in models))
    *_, backward = (graph for graph in explain(models[0]).graphs if graph.phase == "backward")
    reductions = [n for n, each in enumerate(backward.collectives) if each.bucket.kind == "reduce"]
    launched = [launch.collective for launch in backward.launches if launch.collective in reductions]
    assert sorted(launched) == sorted(2 * reductions)


@distributed(world_size=8)
def test_another_number_while_gradients_are_pending(rank, world_size):
    """Sums of two ranks cannot be added to sums of four; without a number they are reduced in the end."""
    model, alone = sharded(), Layers()
    model.set_reshard_after_backward(2)
    model.set_requires_all_reduce(False)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"gradients are pending that 2 ranks have reduced .*'0.weight'.* not 4"):
        model.set_reshard_after_backward(4)
    loss_of(model, 1).backward()
    model.set_reshard_after_backward(True)
    model.set_requires_all_reduce(True)
    loss_of(model, 2).backward()
    sum(loss_of(alone, micro) for micro in range(3)).backward()
    for param, plain in zip(model.parameters(), alone.parameters(), strict=True):
        dist.all_reduce(plain.grad)
        torch.testing.assert_close(param.grad.full_tensor(), plain.grad / world_size)
    model.set_reshard_after_backward(4)
