"""Buckets: what is in them, in which order, and that unpacking gives everyone their own."""

import itertools
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from compiled_fsdp.buckets.spec import Kind
from compiled_fsdp.passes.graph import argument, calls, ops, spec_of
from tests.passes.graphs import Param, backward_of_layers, bucketed, context, inputs_of, launched, text, trace


def reads_of(gm: torch.fx.GraphModule, kind: Kind) -> list[list[int]]:
    return [list(spec_of(node).reads) for node in launched(gm, kind)]


def test_a_layers_backward():
    gm, params, _ = backward_of_layers(layers=1)
    ctx = context(params)
    assert_expected_inline(
        text(bucketed(gm, ctx)),
        """\
launch = launch([shard0, shard1], all_gather)
getitem = getitem(launch)
wait = wait_tensor(getitem)
unpack_gather = unpack_gather(wait)
t = t(unpack_gather)
mm = mm(x1, t)
unpack_gather_1 = unpack_gather(wait)
add = add(mm, unpack_gather_1)
cos = cos(add)
mul = mul(x0, cos)
t_1 = t(mul)
mm_1 = mm(t_1, x1)
sum_1 = sum(mul)
launch_1 = launch([mm_1, sum_1], reduce_scatter)
getitem_1 = getitem(launch_1)
wait_1 = wait_tensor(getitem_1)
unpack_reduce = unpack_reduce(wait_1)
unpack_reduce_1 = unpack_reduce(wait_1)
mm_2 = mm(mul, unpack_gather)
new_zeros = new_zeros(mm_2)
arange = arange()
remainder = remainder(arange)
index_add = index_add(new_zeros, remainder, mm_2)
launch_2 = launch([index_add], reduce_scatter)
getitem_2 = getitem(launch_2)
wait_2 = wait_tensor(getitem_2)
unpack_reduce_2 = unpack_reduce(wait_2)
return [unpack_reduce, unpack_reduce_1, unpack_reduce_2]""",
    )
    assert ctx.summary["arrange"] == "2 reads are 2 gathers, 3 gradients 3 reductions"
    assert ctx.summary["bucket"] == "2 gathers and 3 reductions in 3 buckets"


def read_all(order: list[int], params: list[Param]) -> torch.fx.GraphModule:
    """Reads each of `order`, then reduces the same."""

    def function(shards: Any, slots: Any, x: torch.Tensor) -> list[torch.Tensor]:
        grads = {i: params[i].unshard(shards[i], slots[i], i).cos() * x for i in order}
        return [params[i].reduce(grads[i], slots[i], i) for i in order]

    return trace(function, params, torch.ones(()))


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 0, 1]])
def test_inside_a_bucket_the_order_is_registration_order(order):
    params = [Param((3, 2), 0, 1), Param((5,), 0, 0), Param((1, 2), 1, 0), Param((4,), 0, 2)]
    gm = bucketed(read_all(order, params), context(params))
    for kind in Kind:
        assert sorted(reads_of(gm, kind)) == [[1, 0, 3], [2]]


def test_bucket_none_is_a_bucket_for_each_parameter():
    params = [Param((3, 2), 0, 0), Param((5,), 0, 1)]
    gm = bucketed(read_all([1, 0], params), context(params, bucket="parameter"))
    assert sorted(reads_of(gm, Kind.GATHER)) == [[0], [1]]
    assert sorted(reads_of(gm, Kind.REDUCE)) == [[0], [1]]


def test_dtypes_do_not_mix():
    params = [Param((3, 2), 0, 0), Param((5,), 0, 1, dtype=torch.bfloat16), Param((2,), 0, 2)]
    gm = bucketed(read_all([0, 1, 2], params), context(params))
    found = {spec_of(n).reads: n.meta["val"][0].dtype for n in launched(gm, Kind.GATHER)}
    assert found == {(0, 2): torch.float32, (1,): torch.bfloat16}


def test_reads_of_one_shard_are_one_gather():
    """A trainable and a frozen read of one parameter, as of a forward and an evaluation in one graph."""
    params = [Param((3, 2)), Param((3, 2))]

    def function(shards: Any, slots: Any) -> list[torch.Tensor]:
        return [params[0].unshard(shards[0], slots[0], 0) * 2, params[1].unshard(shards[0], slots[0], 1) * 3]

    gm = bucketed(trace(function, params), context(params))
    assert reads_of(gm, Kind.GATHER) == [[0]]
    assert len(calls(gm, ops.unpack_gather.default)) == 1


def test_gradients_of_one_parameter_are_added_before_one_reduction():
    """As of a reused or tied parameter."""
    params = [Param((3, 2), 0, 0), Param((3, 2), 0, 1)]

    def function(shards: Any, slots: Any, x: torch.Tensor) -> list[torch.Tensor]:
        first, second = (params[0].reduce(x * i, slots[0], 0) for i in (1, 2))
        total = first + second
        return [total, params[1].reduce(x * 3, slots[1], 1)]

    gm = bucketed(trace(function, params, torch.ones(3, 2)), context(params))
    assert reads_of(gm, Kind.REDUCE) == [[0, 1]]
    (total,) = calls(gm, torch.ops.aten.add.Tensor)
    assert [user.target for user in total.users] == [ops.launch.default]


@pytest.mark.parametrize("keep_single", [False, True])
def test_a_group_of_one_communicates_only_when_asked(keep_single):
    params = [Param((3, 2), world=1), Param((2,), 0, 1, world=1)]

    def function(shards: Any, slots: Any, x: torch.Tensor) -> list[torch.Tensor]:
        full = params[0].unshard(shards[0], slots[0], 0)
        return [full, full * x, params[1].reduce(x, slots[1], 1)]

    gm = bucketed(trace(function, params, torch.ones(2)), context(params, collectives_at_world_size_1=keep_single))
    assert len(launched(gm)) == 2 * keep_single
    assert not calls(gm, ops.unshard.default, ops.reduce_grad.default)
    if not keep_single:  # what comes out is no input, or the caller would write into the parameter
        ((shard, *rest),) = inputs_of(params, torch.ones(2))
        gm.recompile()
        full, _, reduced = gm(shard, *rest)
        assert full.data_ptr() != shard.data_ptr()
        assert reduced.data_ptr() != rest[-1].data_ptr()
        assert torch.equal(full, shard)


@pytest.mark.parametrize("world", [2, 3])
def test_values_have_the_shapes_that_the_op_gives(world):
    """Uneven rows: padded in the bucket, and trimmed when they leave it."""
    params = [Param((5, 3), 0, 0, world=world), Param((1,), 0, 1, world=world)]
    gm = bucketed(read_all([0, 1], params), context(params))
    rows = -(-5 // world)
    (gather,), (reduction,) = launched(gm, Kind.GATHER), launched(gm, Kind.REDUCE)
    assert list(gather.meta["val"][0].shape) == [world * (3 * rows + 1)]
    assert list(reduction.meta["val"][0].shape) == [3 * rows + 1]
    assert [list(n.meta["val"].shape) for n in calls(gm, ops.unpack_gather.default)] == [[5, 3], [1]]
    assert [list(n.meta["val"].shape) for n in calls(gm, ops.unpack_reduce.default)] == [[rows, 3], [1]]


def test_gradients_of_one_parameter_that_are_not_added():
    """Each has its own reduction, with the gradient that belongs to it."""
    params = [Param((3, 2), 0, 0), Param((5,), 0, 1)]

    def function(shards: Any, slots: Any, x: torch.Tensor) -> list[torch.Tensor]:
        full = params[0].unshard(shards[0], slots[0], 0)
        first = params[0].reduce(full.sin() * x, slots[0], 0)
        other = params[1].reduce(params[1].unshard(shards[1], slots[1], 1).cos() * x, slots[1], 1)
        second = params[0].reduce(full.cos() * x, slots[0], 0)
        return [first, other, second]

    for bucket in ("parameter", "module"):
        gm = bucketed(trace(function, params, torch.ones(())), context(params, bucket=bucket))
        made_from = []
        for unpacked in next(iter(reversed(gm.graph.nodes))).args[0]:
            launch = argument(unpacked, "bucket").args[0].args[0]
            begins = [0, *itertools.accumulate(spec_of(launch).numels)]
            grad = argument(launch, "tensors")[begins.index(argument(unpacked, "offset"))]
            made_from.append({str(i.target).split(".")[1] for i in grad.all_input_nodes if i.op == "call_function"})
        assert made_from == [{"sin"}, {"cos"}, {"cos"}]
        assert len(launched(gm, Kind.REDUCE)) == (3 if bucket == "parameter" else 1)
