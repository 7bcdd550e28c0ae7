"""What compute and collectives cost, on numbers worked out by hand."""

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import sympy
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import flop_registry

from compiled_fsdp.passes.cost import PROFILES, Contention, CopyEngines, Curve, Hardware, Wires, profile_of
from compiled_fsdp.passes.cost.balance import balance
from compiled_fsdp.passes.cost.compute import node_costs, total_seconds

PLAIN = Hardware(
    name="plain", flops={"float32": 1e12}, copy=1e9, kernel=0.0, memory=1, ranks_per_node=4, inside=Wires(1e-6, 100e9),
    between=Wires(10e-6, 10e9), latency=5e-6, each=2e-6,
)  # fmt: skip


def traced(function, *shapes, symbolic: bool = False) -> GraphModule:
    return make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*map(torch.empty, shapes))


def hints(gm: GraphModule) -> dict:
    """The symbols in the inputs' shapes, with their values."""
    sizes = [size for node in gm.graph.nodes if node.op == "placeholder" for size in node.meta["val"].shape]
    return {size.node.expr: size.node.hint for size in sizes if isinstance(size, torch.SymInt)}


def by_op(gm: GraphModule, **options):
    return {
        node.target._opname: cost for node, cost in node_costs(gm, **options).items() if hasattr(node.target, "_opname")
    }


def test_a_matrix_product_counts_its_operations_and_its_bytes():
    costs = by_op(traced(torch.mm, (8, 16), (16, 4)), fused=True)
    assert costs["mm"].flops == 2 * 8 * 16 * 4
    assert costs["mm"].bytes == 4 * (8 * 16 + 16 * 4 + 8 * 4)
    assert costs["mm"].seconds(PLAIN) == pytest.approx(max(costs["mm"].flops / 1e12, costs["mm"].bytes / 1e9))


def test_what_inductor_fuses_is_not_written():
    """cos(sin(x)) @ w: fused, sin's result never reaches memory; unfused, every operation reads and writes."""
    gm = traced(lambda x, w: torch.cos(torch.sin(x)) @ w, (8, 8), (8, 8))
    size = 4 * 8 * 8
    fused, alone = by_op(gm, fused=True), by_op(gm, fused=False)
    assert [fused[name].bytes for name in ("sin", "cos", "mm")] == [size, size, 3 * size]
    assert [alone[name].bytes for name in ("sin", "cos", "mm")] == [2 * size, 2 * size, 3 * size]
    assert fused["sin"].kernels == 0
    assert fused["cos"].kernels == alone["sin"].kernels == 1


def test_a_product_between_pointwise_operations_divides_them():
    gm = traced(lambda x, w: torch.cos(torch.sin(x) @ w), (8, 8), (8, 8))
    size = 4 * 8 * 8
    assert by_op(gm, fused=True)["sin"].bytes == 2 * size  # the product reads it from memory


def test_views_and_our_ops_cost_nothing():
    assert total_seconds(node_costs(traced(lambda x: x.view(4, 16).t(), (8, 8)), fused=True), PLAIN) == 0


def test_symbolic_costs_are_those_of_their_hints():
    gm = traced(lambda x, w: torch.relu(x @ w).sum(), (24, 64), (64, 32), symbolic=True)
    static = total_seconds(node_costs(gm, fused=True), PLAIN)
    expression = total_seconds(node_costs(gm, fused=True, symbolic=True), PLAIN)
    assert isinstance(expression, sympy.Basic)
    assert float(expression.subs(hints(gm))) == pytest.approx(static)


@pytest.mark.parametrize("product", [torch.mm, torch.bmm])
def test_two_expressions_of_one_size(product):
    """Compiled autograd has other symbols for what backward saved than for what it computes.

    Inner sizes are equal, and are written in two ways.
    """
    batch = (5,) if product is torch.bmm else ()
    gm = traced(product, (*batch, 24, 64), (*batch, 64, 32), symbolic=True)
    inner = next(node for node in gm.graph.nodes if node.op == "placeholder").meta["val"].shape[-1]
    second = [node for node in gm.graph.nodes if node.op == "placeholder"][1]
    other = inner // 2 * (128 // inner)
    second.meta["val"] = second.meta["val"].new_empty(
        (*second.meta["val"].shape[:-2], other, second.meta["val"].shape[-1])
    )
    assert other.node.expr != inner.node.expr
    expression = by_op(gm, fused=True, symbolic=True)[product.__name__].flops
    assert expression.subs(hints(gm)) == by_op(gm, fused=True)[product.__name__].flops


def test_balance_is_the_size_at_which_compute_takes_that_long():
    gm = traced(lambda x, w: x @ w, (24, 64), (64, 32), symbolic=True)
    found = balance(gm, PLAIN, 1e-3, fused=True)
    assert found is not None
    seconds, at = total_seconds(node_costs(gm, fused=True, symbolic=True), PLAIN), hints(gm)
    symbol = next(s for s in at if str(s) == found.symbol)
    assert found.hint == at[symbol]
    assert seconds.subs(at | {symbol: found.size}) >= 1e-3 > seconds.subs(at | {symbol: found.size - 1})
    assert balance(traced(torch.mm, (2, 2), (2, 2)), PLAIN, 1.0, fused=True) is None


def test_balance_of_sizes_that_only_torch_can_write():
    """A stride or a half makes torch's own functions of sizes."""
    gm = traced(lambda x, w: x[: x.shape[0] // 2] @ w, (24, 64), (64, 32), symbolic=True)
    found = balance(gm, PLAIN, 1e-3, fused=True)
    assert found is not None
    assert found.size > 24


def with_cache(q, keys, values, k, v):
    """Attention as with a cache: lengths of keys and values are equal, but made of other sizes."""
    return torch.nn.functional.scaled_dot_product_attention(q, torch.cat([keys, k], 2), torch.cat([values, v], 2))


def test_attention_over_lengths_that_symbols_do_not_show_to_be_equal():
    """torch's formula does not take the symbols as they are: lengths that were equal when traced are taken for one."""
    gm = traced(with_cache, *((2, 4, length, 8) for length in (3, 5, 6, 5, 4)), symbolic=True)
    static, symbolic = by_op(gm, fused=True), by_op(gm, fused=True, symbolic=True)
    attention = next(name for name in static if "attention" in name)
    assert symbolic[attention].flops.subs(hints(gm)) == static[attention].flops == 2 * 2 * (2 * 4) * 3 * 10 * 8
    assert isinstance(symbolic["cat"].bytes, sympy.Basic)
    assert balance(gm, PLAIN, 1e-3, fused=True) is not None


def test_causal_attention_skips_half_of_the_operations():
    """Both kernels have rates of their own, as shares of the rate of products."""

    def attention(q, causal):
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=causal)

    hardware = replace(PLAIN, attention=(0.25, 0.5), copy=1e15)
    full, causal = (by_op(traced(partial(attention, causal=c), (2, 4, 64, 8)), fused=True) for c in (False, True))
    name = next(name for name in full if "attention" in name)
    assert full[name].flops == 2 * causal[name].flops == 4 * (2 * 4) * 64 * 64 * 8
    assert full[name].seconds(hardware) == pytest.approx(full[name].flops / 0.25e12)
    backward = replace(full[name], kind="attention_backward")
    assert backward.seconds(hardware) == pytest.approx(full[name].flops / 0.5e12)


def test_attention_in_a_checkpoint_is_counted():
    """There the partitioner wraps it, because it is a random op, in nodes without a value."""
    op, wrapper = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, torch.ops.higher_order
    example = torch.empty(2, 4, 64, 8, dtype=torch.bfloat16)
    gm = make_fx(lambda q: op(q, q, q, 0.0, True), tracing_mode="fake")(example)
    (q,), output = gm.graph.find_nodes(op="placeholder"), gm.graph.output_node()
    with gm.graph.inserting_before(output):
        state = gm.graph.call_function(wrapper.run_and_save_rng_state, (op, q, q, q, 0.0, True))
        gm.graph.call_function(wrapper.run_with_rng_state, (state, op, q, q, q, 0.0, True))
    plain, *wrapped = (cost for cost in node_costs(gm, fused=True).values() if cost.flops)
    for cost in wrapped:
        assert (cost.flops, cost.kind, cost.dtype) == (plain.flops, "attention", "bfloat16")
    assert len(wrapped) == 2


@pytest.mark.parametrize(
    ("rows", "share"),
    [(8 * 128, 8 / 10), (10 * 128, 1), (11 * 128, 11 / 20), (100, 1 / 10)],
)
def test_tiles_of_a_product_come_in_waves(rows, share):
    """10 multiprocessors: the last wave may be partly empty. An inner length of 128 is not split."""
    hardware = replace(PLAIN, multiprocessors=10, copy=1e15)
    cost = by_op(traced(torch.mm, (rows, 128), (128, 128)), fused=True)["mm"]
    assert cost.seconds(hardware) == pytest.approx(cost.flops / (share * 1e12))


def test_few_tiles_are_split_along_the_inner_dimension():
    hardware = replace(PLAIN, multiprocessors=10, copy=1e15)
    cost = by_op(traced(torch.mm, (128, 4096), (4096, 128)), fused=True)["mm"]
    assert cost.tiles == (1, 4)
    assert cost.seconds(hardware) == pytest.approx(cost.flops / (0.4 * 1e12))


def test_kinds_of_kernels():
    """A collective slows each kind down by a share of its own."""
    costs = by_op(traced(lambda x: torch.relu(x @ x), (8, 8)), fused=True)
    hardware = replace(PLAIN, contention=Contention(product=0.25, memory=0.5))
    assert [costs[name].contention(hardware) for name in ("mm", "relu")] == [0.25, 0.5]
    with pytest.raises(TypeError, match=r"contention must be a Contention, .* but is 0\.25"):
        replace(PLAIN, contention=0.25)


def test_a_formula_that_fails_counts_nothing_and_is_named(caplog):
    def fails(*args, **kwargs):
        raise RuntimeError("no such shape")

    fails.__wrapped__ = None
    gm = traced(lambda x, w: torch.relu(x @ w), (8, 8), (8, 8))
    for symbolic in (False, True):
        caplog.clear()
        with mock.patch.dict(flop_registry, {torch.ops.aten.mm: fails}), caplog.at_level("DEBUG"):
            costs = by_op(gm, fused=True, symbolic=symbolic)
        assert (costs["mm"].flops, costs["mm"].bytes) == (0, 3 * 4 * 8 * 8)
        assert "no operations counted for aten.mm" in caplog.text
        assert "no such shape" in caplog.text


# ---- collectives -----------------------------------------------------------------------------------------------------
def test_a_ring_inside_a_node_and_between_nodes():
    inside, between = PLAIN.curve("gather", 4), PLAIN.curve("reduce", 8)
    assert inside == Curve(5e-6 + 3e-6, 100e9 * 4 / 3, 2e-6)
    assert between.latency == pytest.approx(5e-6 + 6 * 1e-6 + 1 * 10e-6)
    assert between.bytes_per_second == pytest.approx(10e9 * 8 / 7)  # the narrower wires


def test_a_reduce_scatter_that_is_an_all_reduce_moves_twice_the_bytes():
    assert (
        PROFILES["cpu"].curve("gather", 2).bytes_per_second == 2 * PROFILES["cpu"].curve("reduce", 2).bytes_per_second
    )
    assert PROFILES["cpu"].curve("alltoall", 2) == PROFILES["cpu"].curve("gather", 2)


def test_what_was_measured_goes_before_the_model():
    measured = Curve(1.0, 2.0)
    hardware = replace(PLAIN, gather={(4, 1): measured}, all_reduce={(2, 2): measured})
    assert hardware.curve("gather", 4) == measured
    assert hardware.curve("gather", 8) == PLAIN.curve("gather", 8)
    assert Hardware.from_json(hardware.to_json()) == hardware


def test_what_was_measured_on_one_node_says_nothing_of_several():
    inside, between = Curve(1.0, 2.0), Curve(3.0, 4.0)
    hardware = replace(PLAIN, gather={(4, 1): inside, (4, 2): between})
    assert hardware.curve("gather", 4, nodes=1) == inside
    assert hardware.curve("gather", 4, nodes=2) == between
    assert hardware.curve("gather", 4, nodes=4) == PLAIN.curve("gather", 4, nodes=4)


def test_an_all_reduce_is_two_rings():
    """Also with gloo, whose reduce-scatter is an all-reduce, too."""
    for profile in ("cpu", "h100"):
        gather = PROFILES[profile].curve("gather", 4, nodes=2)
        both = PROFILES[profile].curve("all_reduce", 4, nodes=2)
        assert both.latency == pytest.approx(2 * gather.latency)
        assert both.bytes_per_second == pytest.approx(gather.bytes_per_second / 2)


def test_one_rank_a_node_has_one_nic():
    """Tensor parallelism inside of nodes: a group of one rank on each of 8 nodes."""
    hardware = PROFILES["h100"]
    ranks = range(3, 64, 8)
    assert hardware.nodes_of(ranks, 8) == hardware.nodes_of(ranks, None) == 8
    curve = hardware.curve("gather", 8, nodes=8)
    assert curve.bytes_per_second == pytest.approx(hardware.between.bytes_per_second / 8 * 8 / 7)
    assert curve.latency == pytest.approx(hardware.latency + 7 * hardware.between.hop)
    assert curve.bytes_per_second < hardware.curve("gather", 8).bytes_per_second / 8


@pytest.mark.parametrize(
    ("profile", "ranks", "local_world_size", "nodes"),
    [
        ("h100", range(8), 8, 1),
        ("h100", range(16), 8, 2),
        ("h100", range(8), 4, 2),  # nodes of 4
        ("h100", range(0, 16, 2), 8, 2),
        ("gb200", range(72), 4, 1),  # one NVLink domain of 18 hosts
        ("gb200", range(144), 4, 2),
        ("cpu", range(16), None, 1),
        ("cpu", range(4), 2, 2),
    ],
)
def test_nodes_of_a_group(profile, ranks, local_world_size, nodes):
    assert PROFILES[profile].nodes_of(ranks, local_world_size) == nodes


def test_nodes_of_four_have_half_the_bandwidth_of_nodes_of_eight():
    """A GPU has a NIC of its own. Of as many nodes: rings over fewer ranks move less, but share less, too."""
    hardware = PROFILES["h100"]
    eight, four = hardware.curve("gather", 32, nodes=4), hardware.curve("gather", 16, nodes=4)
    assert four.bytes_per_second * 15 / 16 == pytest.approx(eight.bytes_per_second * 31 / 32 / 2)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB200", "gb200"),
        ("cpu", "cpu"),
    ],
)
def test_profiles_are_found_by_the_devices_name(device, name):
    assert profile_of(device) is PROFILES[name]
    assert profile_of("some new device") is None


def test_small_messages_take_the_quicker_protocol():
    """All-gathers on 8 H100s, NCCL beside symmetric memory: pytorch/pytorch#182850 has 20.2 us for 2 MiB."""
    curve = PROFILES["h100"].curve("gather", 8)
    assert curve.seconds(2 * 2**20) == pytest.approx(20.2e-6, rel=0.2)
    assert curve.seconds(0) == pytest.approx(6.6e-6 + 7 * 0.6e-6)
    large = 512 * 2**20
    assert curve.seconds(large, tensors=3) == curve.latency + large / curve.bytes_per_second + 2 * curve.each
    # 8 nodes: 56 hops inside, which take longer there, and 7 between
    many = PROFILES["h100"].curve("gather", 64)
    assert many.quick == (pytest.approx(6.6e-6 + 56 * 1.8 * 0.6e-6 + 7 * 2.7e-6), pytest.approx(35e9 * 64 / 63))


def test_gathers_by_copy_engines_cost_what_was_published():
    """pytorch/pytorch#172714, on 8 H100s: a product of 8192 x 8192 matrices, and a gather of 64 MiB from each rank."""
    h100, size = PROFILES["h100"], 8 * 64 * 2**20
    nccl, copies = h100.curve("gather", 8).seconds(size), h100.curve_by_copies("gather", 8).seconds(size)
    product = 2.96e-3 - nccl
    for hardware, gather, published in ((h100, nccl, 2.02e-3), (h100.by_copies(), copies, 1.77e-3)):
        slower = 1 + hardware.contention.product
        assert gather + (product - gather / slower) == pytest.approx(published, rel=0.05)


def test_costs_of_copy_engines_by_hand():
    """Two copies of this rank's part, each read and written; a reduction reads all parts and writes their sum."""
    plain = replace(PLAIN, copy_engines=CopyEngines(3e-6, 7e-6, Contention(0.5)))
    gather, reduction = (plain.curve_by_copies(kind, 4) for kind in ("gather", "reduce"))
    assert gather.seconds(1e6) == pytest.approx(3e-6 + 1e6 * (0.75 / 100e9 + 1 / 1e9))
    assert reduction.seconds(1e6) == pytest.approx(3e-6 + 1e6 * (0.75 / 100e9 + 2.25 / 1e9))
    assert gather.seconds(1e6, tensors=3) == pytest.approx(gather.seconds(1e6) + 2 * 3e-6)
    assert plain.by_copies().contention == Contention(0.5)
    assert plain.by_copies().host_collective == plain.host_collective + 7e-6
    assert Hardware.from_json(plain.to_json()) == plain
