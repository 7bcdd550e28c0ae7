"""Prefetch lists: what they make of compiled graphs, and what is refused. Results never depend on them.

Plans from tasks by hand are in `tests/passes/plan/test_prefetch_lists.py`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from expecttest import assert_expected_inline

from compiled_fsdp import compiled_autograd, explain, fully_shard
from compiled_fsdp.ranks.failures import RanksDiffer
from compiled_fsdp.reporting.report import GraphReport
from tests.harness import assert_same, compiled, distributed, fsdp2, shard, train, variants
from tests.harness.fake import fake_group

Make = Callable[..., nn.Module]


class Chain(nn.Module):
    """Blocks of two parameters, and a head in the root. `breaks`: the graph ends after each block."""

    def __init__(self, blocks: int = 4, breaks: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
                for _ in range(blocks)
            )
            self.head = nn.Linear(8, 2, bias=False)
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return self.head(x)


class Halves(nn.Module):
    """Two chains of blocks, and a graph for each."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.first, self.second = Chain(blocks), Chain(blocks)
        self.blocks = [*self.first.blocks, *self.second.blocks]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.first.blocks:
            x = block(x)
        torch._dynamo.graph_break()
        return self.second(x)


def listed(model: nn.Module, ahead: int) -> nn.Module:
    """As torch's tutorial does: each block lists the `ahead` blocks after it, and for backward those before it."""
    blocks = list(model.blocks)
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + ahead])
        block.set_modules_to_backward_prefetch(blocks[:i][::-1][:ahead])
    return model


def step(model: nn.Module, index: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2 * index + dist.get_rank())
    x = torch.randn(4, 8, generator=generator, requires_grad=True)  # or backward would not read the first block
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def graphs_of(model: nn.Module, **options: Any) -> tuple[GraphReport, ...]:
    """What a step compiles."""
    step(compiled(model, **{"bucket": "module", **options}))
    return explain(model).graphs


def order(graph: GraphReport) -> str:
    """Launches and waits: U and P for gather and reduction, with the block's number, or r for the root; a dash for its
    wait."""
    events = []
    for flight in graph.collectives:
        first = flight.names[0].split(".")
        name = "UP"[flight.bucket.kind == "reduce"] + (first[1] if first[0] == "blocks" else "r")
        events += [(flight.launch, name), (flight.wait, f"-{name}")]
    return " ".join(name for _, name in sorted(events))


def orders(model: nn.Module, **options: Any) -> str:
    return "\n".join(f"{graph.phase} {order(graph)}" for graph in graphs_of(model, **options))


@pytest.fixture
def sharded() -> Iterator[Make]:
    """Makes sharded chains on rank 0 of 4 that do not exist."""
    with fake_group(4):
        yield lambda model=None, **options: shard(model or Chain(), fully_shard, reshard_after_forward=True, **options)


# ---- bucket="module" -------------------------------------------------------------------------------------------------
def test_so_many_units_ahead(sharded):
    """One is the default; with two, each block's second next goes out before it computes."""
    graphs = [graphs_of(listed(sharded(), ahead)) for ahead in (0, 1, 2)]
    for of, how in zip(graphs, ("one ahead", "prefetch lists", "prefetch lists"), strict=True):
        assert all(f"({how})" in graph.summary["plan"] for graph in of)
    found = ["\n".join(f"{graph.phase} {order(graph)}" for graph in of) for of in graphs]
    assert found[0] == found[1]
    assert_expected_inline(
        found[1],
        """\
forward U0 U1 -U0 U2 -U1 U3 -U2 Ur -U3 -Ur
backward Ur U3 -Ur Pr U2 -U3 P3 -Pr U1 -U2 P2 -P3 U0 -U1 P1 -P2 -U0 -P1 P0 -P0""",
    )
    assert_expected_inline(
        found[2],
        """\
forward U0 U1 U2 -U0 U3 -U1 -U2 Ur -U3 -Ur
backward Ur U3 -Ur Pr U2 U1 -U3 P3 -Pr U0 -U2 P2 -P3 -U1 P1 -P2 -U0 -P1 P0 -P0""",
    )


def test_the_order_of_a_list_is_kept(sharded):
    """What is next goes out as well, after the list."""
    model = sharded()
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[3], model.blocks[2]])
    model.blocks[3].set_modules_to_backward_prefetch([model.blocks[0]])
    assert_expected_inline(
        orders(model),
        """\
forward U0 U3 U2 U1 -U0 -U1 -U2 Ur -U3 -Ur
backward Ur U3 -Ur Pr U0 U2 -U3 P3 -Pr U1 -U2 P2 -P3 -U1 P1 -P2 -U0 -P1 P0 -P0""",
    )


def test_a_unit_that_is_kept_begins_with_its_first_gradient(sharded):
    """The root's: the head's, ahead of all blocks."""
    model = sharded()
    model.set_reshard_after_forward(False, recurse=False)
    model.set_modules_to_backward_prefetch([model.blocks[1]])
    assert_expected_inline(
        orders(model),
        """\
forward U0 U1 -U0 U2 -U1 U3 -U2 Ur -U3 -Ur
backward U3 Pr U1 U2 -U3 P3 -Pr -U2 P2 -P3 U0 -U1 P1 -P2 -U0 -P1 P0 -P0""",
    )


def test_by_parameter(sharded):
    """With `bucket="parameter"`: what is left of the unit itself, then all of its list."""
    forward = graphs_of(listed(sharded(), 2), bucket="parameter")[0]
    names = [forward.reads[bucket.reads[0]].name.removeprefix("blocks.") for bucket in forward.plan.launches]
    starts = [bucket.at for bucket in forward.plan.launches]
    assert names == [f"{block}.{layer}.weight" for block in range(4) for layer in (0, 2)] + ["head.weight"]
    # three blocks at the start; block 1 brings block 3, and the last one's last layer the root's
    assert [starts.count(start) for start in dict.fromkeys(starts)] == [6, 2, 1]


@pytest.mark.more
@pytest.mark.parametrize(
    "options",
    [
        {"overlap": False},
        {"bucket": 0.001},
        {"bucket": [["blocks.[01].*"], ["blocks.2.*", "head*"]]},
    ],
)
def test_where_they_do_not_count(sharded, options):
    assert orders(listed(sharded(), 0), **options) == orders(listed(sharded(), 2), **options)


def test_a_list_is_stronger_than_after(sharded):
    model = sharded()
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
    assert orders(model, prefetch="after").splitlines()[0] == "forward U0 U1 U2 -U0 -U1 -U2 U3 -U3 Ur -Ur"


@pytest.mark.parametrize(("bucket", "budget"), variants([("module", 3), ("module", 1), ("auto", 1)], ("module", 1)))
def test_a_budget_is_kept(sharded, bucket, budget):
    """Three units ahead become one if the budget is the peak of one unit ahead."""

    def peak(ahead: int, **options: Any) -> int:
        return max(graph.simulation.peak for graph in graphs_of(listed(sharded(), ahead), **options))

    peaks = {ahead: peak(ahead) for ahead in (1, 3)}
    assert peaks[3] > peaks[1]
    found = peak(3, bucket=bucket, memory_budget=peaks[budget])
    assert found == peaks[budget] if bucket == "module" else found <= peaks[budget]


# ---- compiled once, and again ----------------------------------------------------------------------------------------
def test_other_lists_are_another_plan(sharded):
    """Set between two steps, taken away, and on an equal model. Equal lists share their code."""
    model = sharded()
    for ahead, graphs in [(0, 2), (2, 4), (2, 4), (1, 6), (0, 6)]:
        assert len(graphs_of(listed(model, ahead))) == graphs
    equal, other = listed(sharded(), 2), listed(sharded(), 3)
    assert "U1 U2 -U0" in order(graphs_of(equal)[0])
    assert len(graphs_of(model)) == 6
    assert "U1 U2 U3 -U0" in order(graphs_of(other)[0])
    assert [len(explain(m).graphs) for m in (equal, other)] == [2, 2]


def test_what_is_in_another_graph_does_not_count(sharded):
    """Each of the two blocks before a break lists one after it, too."""
    model = listed(sharded(Halves()), 2)
    ahead = {graph.phase: [] for graph in graphs_of(model)}
    for graph in explain(model).graphs:
        ahead[graph.phase].append([read.prefetch_blocks[0] for read in graph.reads[::2]])
    assert ahead["forward"] == [[(1,), ()], [(1,), (), ()]]


def test_equal_layers_after_breaks_share_their_graphs(sharded):
    """Though their lists are not alike: the last one's is empty."""
    found = [len(graphs_of(listed(sharded(Chain(breaks=True)), ahead))) for ahead in (0, 2)]
    assert found[0] == found[1]


@pytest.mark.more
def test_compiled_autograds_backward(sharded):
    """It is planned across the breaks of its forward, lists and all."""
    found = []
    for ahead in (1, 2):
        model = listed(sharded(Chain(breaks=True)), ahead)
        with compiled_autograd(codegen="aot_eager", bucket="module"):
            step(compiled(model, bucket="module"))
        (backward,) = (g for g in explain(model).graphs if g.phase == "backward" and g.count("reduce") > 1)
        found.append(order(backward))
    assert "U2 -U3" in found[0]
    assert "U2 U1 -U3" in found[1]


# ---- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"])
def test_what_is_no_unit(sharded, name):
    """FSDP2's words, and the list as it was."""
    model = listed(sharded(), 1)
    before = [block._fsdp_unit.prefetch_lists.key for block in model.blocks]
    for wrong, error, match in [
        ([model.blocks[2], model.head], ValueError, r"Expects FSDPModule but got <class .*Linear'>: Linear\("),
        (["blocks.1"], ValueError, "Expects FSDPModule but got <class 'str'>: blocks.1"),
        ([torch.distributed.fsdp.fully_shard(nn.Linear(4, 4))], ValueError, "Expects FSDPModule but got .*FSDPLinear"),
        (False, TypeError, "not iterable"),
    ]:
        with pytest.raises(error, match=match):
            getattr(model.blocks[1], name)(wrong)
    assert [block._fsdp_unit.prefetch_lists.key for block in model.blocks] == before


# ---- on two ranks ----------------------------------------------------------------------------------------------------
@distributed(world_size=2)
@pytest.mark.parametrize("bucket", variants(["module", "auto"], "module"))
def test_results_are_fsdp2s(rank, world_size, bucket):
    """Bit for bit, with the same lists there. Uncompiled they change nothing."""
    expected = train(listed(fsdp2(Chain(3)), 2), step)
    model = listed(shard(Chain(3), fully_shard), 2)
    assert_same(train(compiled(model, bucket=bucket, verify="full"), step), expected)
    assert len(explain(model).graphs) == 2
    assert_same(train(listed(shard(Chain(3), fully_shard), 2), step), expected)


@pytest.mark.more
@distributed(world_size=2)
def test_results_of_a_broken_forward_are_fsdp2s(rank, world_size):
    """Gathers that are in flight between the graphs, and lists that turn the order around inside of them."""

    def turned(model: nn.Module) -> nn.Module:
        for chain in (model.first, model.second):
            first, *others = chain.blocks
            first.set_modules_to_forward_prefetch(others[::-1])
            others[-1].set_modules_to_backward_prefetch([first, *others[:-1]])
        return model

    model = turned(shard(Halves(3), fully_shard))
    assert_same(train(compiled(model, bucket="module", verify="full"), step), train(turned(fsdp2(Halves(3))), step))
    forwards = [graph for graph in explain(model).graphs if graph.phase == "forward"]
    names = [[flight.names[0] for flight in graph.collectives] for graph in forwards]
    blocks = [[name.split(".")[2] for name in of if "blocks" in name] for of in names]
    assert blocks == [["0", "2", "1"]] * 2


@distributed(world_size=2)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_ranks_with_other_lists(rank, world_size, direction):
    model = shard(Chain(2), fully_shard)
    if rank == 1:
        getattr(model.blocks[0], f"set_modules_to_{direction}_prefetch")([model.blocks[1]])
    lists = {"forward": r"\[\[2\], \[\]\]", "backward": r"\[\[\], \[2\]\]"}[direction]
    match = rf"Rank 1 of the group has: .*, prefetches {lists}; rank 0 has: .*, resharded, float32 avg\."
    with pytest.raises(RanksDiffer, match=match):
        compiled(model)(torch.ones(2, 8))
