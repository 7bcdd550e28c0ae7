"""Sharding with replicas on 2-D meshes, and gathers over a part of the ranks in backward."""

import contextlib
import itertools
from collections import Counter
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, Shard

from compiled_fsdp import compiled_autograd, explain, fully_shard
from compiled_fsdp.runtime.reduce_scatter import PendingReduceScatter
from tests.harness import WAYS, assert_same, compiled, distributed, fsdp2, loss_of, planned_ops, shard, train, variants
from tests.harness.meshes import mesh_2d
from tests.harness.models import BUILD, small
from tests.harness.ours import counted
from tests.harness.reference import assert_same_gradients


@pytest.mark.parametrize(
    ("run", "build"),
    [("eager", "whole"), ("compiled_fsdp", "whole"), pytest.param("compiled_fsdp", "broken", marks=pytest.mark.more)],
)
@distributed(world_size=4)
def test_equal_to_fsdp2(rank, world_size, run, build):
    """Gathers over the shards; reductions over shards, then over replicas."""
    mesh = mesh_2d("replicas", "shards")
    model, reference = shard(BUILD[build](), fully_shard, mesh=mesh), fsdp2(BUILD[build](), mesh=mesh)
    assert {p.placements for p in model.parameters()} == {(Replicate(), Shard(0))}
    assert [p.to_local().shape for p in model.parameters()] == [p.to_local().shape for p in reference.parameters()]
    assert_same(train(WAYS[run](model)), train(reference), rtol=1e-6)


@distributed(world_size=4)
def test_collectives(rank, world_size):
    """A reduction and an all-reduce a unit; planned graphs are the same on all ranks."""
    model = shard(small(blocks=2), fully_shard, mesh=mesh_2d("replicas", "shards"))
    run = compiled(model, bucket="module")
    loss_of(run, rank, 0).backward()
    forward, backward = explain(model).graphs
    assert planned_ops(forward)["gather"] == 3
    assert (planned_ops(backward)["reduce"], planned_ops(backward)["all_reduce"]) == (3, 3)
    texts = [None] * world_size
    torch.distributed.all_gather_object(texts, [graph.planned for graph in (forward, backward)])
    assert all(text == texts[0] for text in texts)
    found = counted(lambda: loss_of(run, rank, 1).backward())
    assert found == {"AG": 5, "RS": 3, "AR": 3}


FLAGS = {
    "set_requires_all_reduce": [(3, 0), (3, 0), (3, 3)],
    "set_requires_gradient_sync": [(0, 0), (0, 0), (3, 3)],
}


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("run", variants(["eager", "aot_eager"], "eager"))
@distributed(world_size=4)
def test_accumulation(rank, world_size, run, flag):
    """Reductions 3/3/3 and all-reduces 0/0/3 without the all-reduce; neither without sync; `.grad` is None before."""
    mesh = mesh_2d("replicas", "shards")
    model, reference = shard(small(blocks=2), fully_shard, mesh=mesh), fsdp2(small(blocks=2), mesh=mesh)
    call = model if run == "eager" else compiled(model, bucket="module")

    def micro(m, call, index, number):
        getattr(m, flag)(number == 2)
        loss = loss_of(call, rank, index * 3 + number)
        loss.backward()
        assert (next(m.parameters()).grad is None) == (number < 2)
        return loss.detach()

    def step(m):
        return lambda call, index: [micro(m, call, index, number) for number in range(3)][-1]

    assert_same(train(call, step(model)), train(reference, step(reference)), rtol=1e-6)
    model.zero_grad()
    found = [counted(partial(micro, model, call, 0, number)) for number in range(3)]
    assert [(kinds["RS"], kinds["AR"]) for kinds in found] == FLAGS[flag]


@distributed(world_size=4)
def test_gradient_sync_says_it_for_replicas_too(rank, world_size):
    """`set_requires_gradient_sync` after `set_requires_all_reduce` undoes it; `no_sync()` leaves both as they were."""
    mesh = mesh_2d("replicas", "shards")
    model, reference = shard(small(), fully_shard, mesh=mesh), fsdp2(small(), mesh=mesh)
    for each in (model, reference):
        each.set_requires_all_reduce(False)
        each.set_requires_gradient_sync(True)
        loss_of(each, rank, 0).backward()
    assert_same_gradients(model, reference, rtol=1e-6, atol=1e-8)
    model.zero_grad()
    model.set_requires_all_reduce(False)
    with model.no_sync():
        pass
    loss_of(model, rank, 0).backward()
    assert all(param.grad is None for param in model.parameters())
    model.set_requires_all_reduce(True)


@distributed(world_size=4)
def test_mixed_precision_on_two_dimensions(rank, world_size):
    mp = MixedPrecisionPolicy(torch.float16, torch.float16)
    mesh = mesh_2d("replicas", "shards")
    model, reference = (
        shard(small(), fully_shard, mesh=mesh, mp_policy=mp),
        fsdp2(small(), mesh=mesh, mp_policy=mp),
    )
    for m in (model, reference):
        loss_of(compiled(m) if m is model else m, rank, 0).backward()
    assert_same_gradients(model, reference, rtol=2e-3, atol=1e-5)


@distributed(world_size=4)
def test_replicas_that_differ(rank, world_size):
    """Without the option what each has, as with FSDP2; with it the first rank's values, buffers too, on all."""
    mesh = mesh_2d("replicas", "shards")
    for sync in (False, True):
        model = small(rank)
        model.register_buffer("count", torch.tensor([float(rank)]))
        fully_shard(model, mesh=mesh, sync_module_states=sync)
        values = [model.count, *(p.full_tensor() for p in model.parameters())]
        everyone = [None] * world_size
        torch.distributed.all_gather_object(everyone, values)
        same = [all(torch.equal(a, b) for a, b in zip(other, everyone[0], strict=True)) for other in everyone]
        assert all(same) == sync
    expected = [torch.zeros(1), *small(0).parameters()]
    assert all(torch.equal(value, other) for value, other in zip(values, expected, strict=True))
    model = small(rank)
    fully_shard(model, sync_module_states=True)
    for mine, first in zip(model.parameters(), small(0).parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), first)


@pytest.mark.parametrize("build", ["whole", pytest.param("broken", marks=pytest.mark.more)])
@distributed(world_size=4)
def test_a_part_of_the_ranks_gathers_in_backward(rank, world_size, build):
    """`reshard_after_forward=2` of 4: equal to FSDP2; forward gathers over one group, backward over another, of two."""
    model = shard(BUILD[build](), fully_shard, reshard_after_forward=2)
    expected = train(fsdp2(BUILD[build](), reshard_after_forward=2))
    assert_same(train(compiled(model, bucket="module")), expected, rtol=1e-6)
    if build == "whole":
        worlds = Counter()
        for graph in explain(model).graphs:
            worlds[graph.phase] = sorted({(bucket.kind, bucket.group_id) for bucket in graph.plan.launches})
        assert worlds == {"forward": [("gather", 0)], "backward": [("gather", 1), ("reduce", 0)]}


@pytest.mark.more
@distributed(world_size=4)
def test_without_regather_all_ranks_gather_in_backward(rank, world_size):
    """The pass that leaves pieces behind, switched off: the same numbers."""
    model = shard(small(), fully_shard, reshard_after_forward=2)
    run = compiled(model, bucket="module", disable_passes=["regather"])
    assert_same(train(run), train(fsdp2(small(), reshard_after_forward=2)), rtol=1e-6)
    assert {bucket.group_id for graph in explain(model).graphs for bucket in graph.plan.launches} == {0}


@pytest.mark.parametrize("run", ["eager", pytest.param("compiled_fsdp", marks=pytest.mark.more)])
@distributed(world_size=4)
def test_other_dimensions(rank, world_size, run):
    """`shard_placement_fn`: linear layers by columns, on 1-D and 2-D meshes; uneven ones are refused."""

    def by_columns(param: nn.Parameter) -> Shard | None:
        return Shard(-1) if param.dim() == 2 and param.shape[1] % 4 == 0 else None

    for mesh in (None, mesh_2d("replicas", "shards")):
        options = {"mesh": mesh, "shard_placement_fn": by_columns}
        model, reference = shard(small(), fully_shard, **options), fsdp2(small(), **options)
        assert model.head.weight.placements[-1] == Shard(1)
        assert [p.to_local().shape for p in model.parameters()] == [p.to_local().shape for p in reference.parameters()]
        assert_same(train(WAYS[run](model)), train(reference), rtol=1e-6)
    with pytest.raises(NotImplementedError, match=r"shard_placement_fn: uneven sharding on dim 1.*'weight' of Linear"):
        fully_shard(nn.Linear(7, 8), shard_placement_fn=lambda param: Shard(1) if param.dim() == 2 else None)


@pytest.mark.more
@distributed(world_size=4)
def test_inductor(rank, world_size):
    model, reference = (
        shard(small(), fully_shard, mesh=mesh_2d("replicas", "shards")),
        fsdp2(small(), mesh=mesh_2d("replicas", "shards")),
    )
    for m in (model, reference):
        loss_of(compiled(m, codegen="inductor") if m is model else m, rank, 0).backward()
    assert_same_gradients(model, reference, rtol=1e-5, atol=1e-6)


@distributed(world_size=4)
def test_broken_graphs_reduce_over_replicas_beside_the_next_graph(rank, world_size):
    """A graph's reduction over the shards is in flight during the next graph, that over replicas during the one after:
    it is launched when the first is waited for, and is not waited for then and there."""
    model = shard(BUILD["broken"](), fully_shard, mesh=mesh_2d("replicas", "shards"))
    run = compiled(model)
    loss_of(run, rank, 0).backward()
    events = []

    def noted(name, method):
        def call(pending, *args, **kwargs):
            if name != "wait" or pending.in_flight:
                events.append((name, pending))
            return method(pending, *args, **kwargs)

        return mock.patch.object(PendingReduceScatter, method.__name__, call)

    methods = {"reduce": "launch", "all_reduce": "_reduce_again", "wait": "wait"}
    with contextlib.ExitStack() as stack:
        for name, method in methods.items():
            stack.enter_context(noted(name, getattr(PendingReduceScatter, method)))
        loss_of(run, rank, 1).backward()
    buckets = [pending for name, pending in events if name == "reduce"]
    assert len(buckets) >= 3, events
    places = {event: place for place, event in enumerate(events)}
    for k, bucket in enumerate(buckets):
        following = [places["reduce", other] for other in buckets[k + 1 : k + 3]]
        assert all(places["wait", bucket] > place for place in following), events
        assert all(places["all_reduce", bucket] < place for place in following[1:]), events


POLICIES = {
    "float32": {},
    "bf16": {"reduce_dtype": torch.bfloat16},
    "fp16": {"param_dtype": torch.float16, "reduce_dtype": torch.float16},
}
UNCOMPILED = [("eager", policy) for policy in POLICIES]


@pytest.mark.parametrize(
    ("run", "policy"),
    variants(
        itertools.product(["eager", "aot_eager", "compiled autograd"], POLICIES), *UNCOMPILED, ("aot_eager", "float32")
    ),
)
@distributed(world_size=2)
def test_one_replica(rank, world_size, run, policy):
    """A mesh of one replica: gradients wait for `set_requires_all_reduce(True)` as on one of several, and no hook runs
    before; with other numbers on the wire, too, and where the last backward does not reach all that waits."""
    records = []
    for function in (fully_shard, torch_fully_shard):
        ours = function is fully_shard
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards"))
        model = shard(small(), function, mesh=mesh, mp_policy=MixedPrecisionPolicy(**POLICIES[policy]))
        call = compiled(model) if ours and run != "eager" else model
        fired, record = [], []
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name, fired=fired: fired.append(name))
        for number in range(4):
            model.set_requires_all_reduce(number == 2)
            loss = loss_of(call, rank, number)
            captured = ours and run == "compiled autograd"
            with compiled_autograd(codegen="aot_eager") if captured else contextlib.nullcontext():
                loss.backward()
            assert (next(model.parameters()).grad is None) == (number < 2)
            assert sorted(fired) == sorted(name for name, _ in model.named_parameters()) * (number >= 2)
            record.append([p.grad.full_tensor() for p in model.parameters()] if number >= 2 else [])
        records.append(record)
    for mine, theirs in zip(*records, strict=True):
        assert all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True))
