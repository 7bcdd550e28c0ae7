"""Lowering: plain collectives in place of our ops, and the same results."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from compiled_fsdp.buckets.spec import Kind
from compiled_fsdp.buckets.transport import WAIT
from compiled_fsdp.passes.context import Groups
from compiled_fsdp.passes.cost import PROFILES
from compiled_fsdp.passes.graph import argument, calls, ops
from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.pipeline import run_passes, through
from tests.passes.graphs import (
    GROUP,
    Machine,
    Param,
    backward_of_layers,
    bucketed,
    context,
    gathers,
    inputs_of,
    launched,
    planned,
    reductions,
    text,
    trace,
)


def one_of_each(params: list[Param]) -> torch.fx.GraphModule:
    def function(shards: Any, slots: Any, x: torch.Tensor) -> list[torch.Tensor]:
        fulls = [p.unshard(shards[i], slots[i], i) for i, p in enumerate(params)]
        return [p.reduce(full.cos() * x, slots[i], i) for i, (p, full) in enumerate(zip(params, fulls, strict=True))]

    return trace(function, params, torch.ones(()))


def test_a_bucket_of_two():
    params = [Param((4, 3), 0, 0), Param((5,), 0, 1)]
    gm = lower(planned(one_of_each(params), context(params)), context(params))
    assert_expected_inline(
        text(gm),
        """\
view = view(shard0)
cat = cat([view, shard1])
new_empty = new_empty(cat)
all_gather_into_out = all_gather_into_tensor_out(cat)
wait = wait_tensor(all_gather_into_out)
view_4 = view(wait)
slice = slice(view_4)
clone = clone(slice)
_unsafe_view = _unsafe_view(clone)
view_5 = view(wait)
slice_1 = slice(view_5)
clone_1 = clone(slice_1)
_unsafe_view_1 = _unsafe_view(clone_1)
slice_2 = slice(_unsafe_view_1)
cos = cos(_unsafe_view)
mul = mul(cos, x0)
cos_1 = cos(slice_2)
mul_1 = mul(cos_1, x0)
view_1 = view(mul)
constant_pad_nd = constant_pad_nd(mul_1)
view_2 = view(constant_pad_nd)
cat_1 = cat([view_1, view_2])
view_3 = view(cat_1)
reduce_scatter = reduce_scatter_tensor(view_3)
wait_1 = wait_tensor(reduce_scatter)
slice_3 = slice(wait_1)
view_6 = view(slice_3)
slice_4 = slice(wait_1)
return [view_6, slice_4]""",
    )
    assert [node.args[1:] for node in gathers(gm)] == [(2, GROUP)]
    assert [node.args[1:] for node in reductions(gm)] == [("avg", 2, GROUP)]


def test_a_bucket_that_kernels_copy():
    """One op packs it, one unpacks it, whatever it holds; the rest are views. The reduced bucket is not copied."""
    params = [Param((4, 3), 0, 0), Param((5,), 0, 1)]
    gm = lower(planned(one_of_each(params), context(params, kernels=True)), context(params, kernels=True))
    assert_expected_inline(
        text(gm),
        """\
pack_shards = pack_shards([shard0, shard1])
new_empty = new_empty(pack_shards)
all_gather_into_out = all_gather_into_tensor_out(pack_shards)
wait = wait_tensor(all_gather_into_out)
unpack_fulls = unpack_fulls(wait)
slice = slice(unpack_fulls)
view = view(slice)
slice_1 = slice(unpack_fulls)
slice_2 = slice(slice_1)
cos = cos(view)
mul = mul(cos, x0)
cos_1 = cos(slice_2)
mul_1 = mul(cos_1, x0)
pack_grads = pack_grads([mul, mul_1])
reduce_scatter = reduce_scatter_tensor(pack_grads)
wait_1 = wait_tensor(reduce_scatter)
slice_3 = slice(wait_1)
view_1 = view(slice_3)
slice_4 = slice(wait_1)
return [view_1, slice_4]""",
    )


def test_a_bucket_that_torch_copies():
    """One op packs it, one unpacks it, on the CPU under Inductor; what an all-to-all left is added by one."""
    params = [Param((4, 3), 0, 0), Param((5,), 0, 1)]
    slow_reduction = replace(PROFILES["cpu"], reduce_moves=2.0, copy=1e12)
    options = {"library_copies": True, "may_use_all_to_all": True, "hardware": slow_reduction}
    gm = lower(planned(one_of_each(params), context(params, **options)), context(params, **options))
    assert_expected_inline(
        text(gm),
        """\
view_6 = view(shard0)
cat_bucket = cat_bucket([view_6, shard1])
new_empty = new_empty(cat_bucket)
all_gather_into_out = all_gather_into_tensor_out(cat_bucket)
wait = wait_tensor(all_gather_into_out)
split_bucket = split_bucket(wait)
getitem_2 = getitem(split_bucket)
getitem_3 = getitem(split_bucket)
view = view(getitem_2)
view_1 = view(getitem_3)
slice = slice(view_1)
cos = cos(view)
mul = mul(cos, x0)
cos_1 = cos(slice)
mul_1 = mul(cos_1, x0)
view_7 = view(mul)
constant_pad_nd = constant_pad_nd(mul_1)
view_8 = view(constant_pad_nd)
cat_bucket_1 = cat_bucket([view_7, view_8])
view_9 = view(cat_bucket_1)
all_to_all_single = all_to_all_single(view_9)
wait_1 = wait_tensor(all_to_all_single)
sum_bucket = sum_bucket(wait_1)
getitem_4 = getitem(sum_bucket)
getitem_5 = getitem(sum_bucket)
view_3 = view(getitem_4)
view_5 = view(getitem_5)
return [view_3, view_5]""",
    )


def test_copies_do_not_round_narrow_gradients_twice():
    """Pieces in bfloat16 are added by generated code, which rounds their average once."""
    params = [Param((4, 3), 0, 0, dtype=torch.bfloat16), Param((5,), 0, 1, dtype=torch.bfloat16)]
    options = {"library_copies": True, "may_use_all_to_all": True}
    gm = lower(planned(one_of_each(params), context(params, **options)), context(params, **options))
    assert [len(calls(gm, op)) for op in (ops.split_bucket.default, ops.sum_bucket.default)] == [1, 0]


def test_kernels_leave_every_shard_aligned():
    """Shards of 6 and 3 elements: the second begins at element 16 of each rank's part, which is 32 elements long."""
    params = [Param((4, 3), 0, 0), Param((5,), 0, 1)]
    gm = planned(one_of_each(params), context(params, kernels=True))
    (gather,), (reduction,) = launched(gm, Kind.GATHER), launched(gm, Kind.REDUCE)
    assert (gather.meta["val"][0].numel(), reduction.meta["val"][0].numel()) == (64, 32)
    for unpack in (ops.unpack_gather.default, ops.unpack_reduce.default):
        assert [argument(node, "offset") for node in calls(gm, unpack)] == [0, 16]


def test_casts_of_a_coalesced_bucket():
    """One kernel casts what has to be cast; its pieces are sent. What is stored as it is sent is sent as it is.

    The first use waits for all tensors, because the plan counts the sent memory only until the first wait.
    """
    params = [
        Param((4, 3), 0, 0, dtype=torch.bfloat16, stored=torch.float32),
        Param((6,), 0, 1, dtype=torch.bfloat16),
        Param((5,), 0, 2, dtype=torch.bfloat16, stored=torch.float32),
    ]
    free = replace(PROFILES["h100"], each=0.0, copy=1e3)
    options = {"kernels": True, "hardware": free, "bucket": 100}
    gm = lower(planned(one_of_each(params), context(params, **options)), context(params, **options))
    assert_expected_inline(
        text(gm),
        """\
pack_shards = pack_shards([shard0, shard2])
slice = slice(pack_shards)
slice_1 = slice(pack_shards)
new_empty = new_empty(slice)
all_gather_into_out = all_gather_into_tensor_out(slice)
new_empty_1 = new_empty(shard1)
all_gather_into_out_1 = all_gather_into_tensor_out(shard1)
new_empty_2 = new_empty(slice_1)
all_gather_into_out_2 = all_gather_into_tensor_out(slice_1)
wait = wait_tensor(all_gather_into_out)
view_5 = view(wait)
wait_1 = wait_tensor(all_gather_into_out_1)
wait_2 = wait_tensor(all_gather_into_out_2)
slice_2 = slice(wait_2)
cos = cos(view_5)
mul = mul(cos, x0)
cos_1 = cos(wait_1)
mul_1 = mul(cos_1, x0)
cos_2 = cos(slice_2)
mul_2 = mul(cos_2, x0)
view_1 = view(mul)
constant_pad_nd = constant_pad_nd(mul_2)
reduce_scatter = reduce_scatter_tensor(view_1)
reduce_scatter_1 = reduce_scatter_tensor(mul_1)
reduce_scatter_2 = reduce_scatter_tensor(constant_pad_nd)
wait_3 = wait_tensor(reduce_scatter)
convert_element_type = convert_element_type(wait_3)
view_8 = view(convert_element_type)
wait_4 = wait_tensor(reduce_scatter_1)
wait_5 = wait_tensor(reduce_scatter_2)
convert_element_type_1 = convert_element_type(wait_5)
return [view_8, wait_4, convert_element_type_1]""",
    )


def test_a_bucket_of_one_is_not_copied():
    """Even rows: neither packing nor unpacking makes another tensor."""
    params = [Param((4, 3))]
    assert_expected_inline(
        text(lower(planned(one_of_each(params), context(params)), context(params))),
        """\
view = view(shard0)
new_empty = new_empty(view)
all_gather_into_out = all_gather_into_tensor_out(view)
wait = wait_tensor(all_gather_into_out)
view_4 = view(wait)
cos = cos(view_4)
mul = mul(cos, x0)
view_2 = view(mul)
reduce_scatter = reduce_scatter_tensor(view_2)
wait_1 = wait_tensor(reduce_scatter)
view_5 = view(wait_1)
return [view_5]""",
    )


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("bucketed", [True, False])
@pytest.mark.parametrize("sizes", [[(4, 3), (5,), (1, 2, 2), (7, 1)], [(8,)], [(1,), (1,)]])
def test_results_are_the_same(sizes, bucketed, world):
    """Shards of uneven rows, ranks without any row, several dimensions; single reads where `bucket` is switched off."""
    params = [Param(size, 0, i, world=world) for i, size in enumerate(sizes)]
    ctx = context(
        params,
        disabled_passes=frozenset() if bucketed else frozenset({"bucket", "schedule"}),
        collectives_at_world_size_1=True,
    )
    inputs = inputs_of(params, torch.tensor(0.5))
    expected = Machine().run(one_of_each(params), inputs)
    machine = Machine()
    actual = machine.run(run_passes(through("lower"), one_of_each(params), ctx), inputs)
    for ours, theirs in zip(actual, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
    assert len(machine.launches) == 2 * (1 if bucketed else len(sizes))


@pytest.mark.parametrize("keep_single", [False, True])
def test_single_reads_in_a_group_of_one(keep_single):
    params = [Param((4, 3), world=1)]
    gm = lower(one_of_each(params), context(params, collectives_at_world_size_1=keep_single))
    assert len([*gathers(gm), *reductions(gm), *calls(gm, WAIT)]) == 4 * keep_single


def test_none_of_our_ops_is_left_and_values_are_right():
    gm, params, others = backward_of_layers()
    frames = {node.name: f"line of {node.name}" for node in gm.graph.nodes if node.op == "call_function"}
    for node in gm.graph.nodes:
        node.meta["stack_trace"] = frames.get(node.name)
    ctx = context(params)
    gm = run_passes(through("lower"), gm, ctx)
    assert not [node for node in gm.graph.nodes if "compiled_fsdp" in str(node.target)]
    gm.recompile()

    class Check(torch.fx.Interpreter):
        """Compares what is noted of each node with what it gives."""

        def run_node(self, node: torch.fx.Node) -> Any:
            noted = node.meta.get("val")
            if node.target is WAIT:
                return self.env[node.args[0]]
            if node in launches:
                given = self.env[node.args[0]].numel()
                assert noted.numel() == (given * 2 if node in gathers(gm) else given // 2)
                return torch.zeros(noted.shape)
            result = super().run_node(node)
            if node.op == "call_function":
                assert (result.shape, result.stride(), result.dtype) == (noted.shape, noted.stride(), noted.dtype), node
            return result

    launches = [*gathers(gm), *reductions(gm)]
    Check(gm).run(*inputs_of(params, *others)[0])


def test_where_a_node_came_from_is_kept():
    """Profilers and the generated code show it."""
    params = [Param((4, 3))]
    gm = one_of_each(params)
    for node in gm.graph.nodes:
        node.meta |= {"stack_trace": f"line of {node.name}", "seq_nr": 7}
    gm = lower(gm, context(params))
    assert {node.meta["stack_trace"] for node in [*gathers(gm), *reductions(gm), *calls(gm, WAIT)]} == {
        "line of unshard",
        "line of reduce_grad",
    }
    assert {node.meta["seq_nr"] for node in [*gathers(gm), *reductions(gm), *calls(gm, WAIT)]} == {7}


def test_groups_are_resolved_by_label():
    params = [Param((4, 3))]
    ctx = context(params)
    ctx.groups = {0: Groups.one("this rank's name of it")}
    gm = lower(one_of_each(params), ctx)
    assert [node.args[-1] for node in [*gathers(gm), *reductions(gm)]] == ["this rank's name of it"] * 2


def test_a_bucket_casts_gradients_that_are_complete():
    """A cast before the only reduction goes. Casts of two gradients that are added stay, because they round the sum."""
    params = [Param((4,), 0, i, dtype=torch.bfloat16, stored=torch.float32) for i in range(2)]

    def function(shards: Any, slots: Any, x: torch.Tensor) -> list[torch.Tensor]:
        grads = [(x * i).to(torch.bfloat16) for i in range(1, 4)]
        once, first, second = (params[p].reduce(grad, slots[p], p) for p, grad in zip((0, 1, 1), grads, strict=True))
        return [once, first + second]

    gm, inputs = trace(function, params, torch.ones(4)), inputs_of(params, torch.tensor([0.1, 0.7, 1.1, 3.3]))
    expected = Machine().run(gm, inputs)
    gm = bucketed(gm, context(params))
    assert_expected_inline(
        text(gm),
        """\
mul = mul(x0)
mul_1 = mul(x0)
_to_copy_1 = _to_copy(mul_1)
mul_2 = mul(x0)
_to_copy_2 = _to_copy(mul_2)
add = add(_to_copy_1, _to_copy_2)
launch = launch([mul, add], reduce_scatter)
getitem = getitem(launch)
wait = wait_tensor(getitem)
unpack_reduce = unpack_reduce(wait)
unpack_reduce_1 = unpack_reduce(wait)
return [unpack_reduce, unpack_reduce_1]""",
    )
    for got, want in zip(Machine().run(lower(gm, context(params)), inputs), expected, strict=True):
        assert torch.equal(got[0], want[0])
