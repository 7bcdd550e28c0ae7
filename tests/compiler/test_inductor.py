"""With Inductor: results within rounding of FSDP2's, the planned order in the generated code, gradients that stay."""

import re
import uuid
from itertools import pairwise

import pytest
import torch
import torch.nn as nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from compiled_fsdp import explain, fully_shard
from compiled_fsdp.reporting.report import GraphReport
from tests.harness import (
    Record,
    Transformer,
    assert_same,
    compiled,
    distributed,
    forward_backward,
    fsdp2,
    fsdp2_record,
    run_ranks,
    shard,
    train,
)
from tests.harness.fake import fake_group
from tests.harness.hardware import EXCHANGING, GROUPING, SCATTERING
from tests.harness.models import VOCABULARY, small

Event = tuple[str, int]


def loss_distance(actual: Record, expected: Record) -> float:
    """The largest difference of a loss, relative to the loss."""
    pairs = zip(actual.losses, expected.losses, strict=True)
    return max(((ours - theirs).abs() / theirs.abs()).item() for ours, theirs in pairs)


def parameter_distance(actual: Record, expected: Record) -> float:
    """The distance of the last step's parameters, all as one vector, relative to its length."""
    ours, theirs = (torch.cat([p.flatten() for p in run.parameters[-1].values()]) for run in (actual, expected))
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.more
@distributed(world_size=2)
def test_five_steps_stay_near_fsdp2(rank, world_size):
    """Our backend, and torch's own on our model, from equal parameters."""
    eager = fsdp2_record(Transformer(blocks=1), steps=5)
    by_block = fsdp2(Transformer(blocks=1))
    for block in by_block.blocks:
        block.compile()
    theirs = train(by_block, steps=5)
    ways = {
        "compiled_fsdp": compiled(shard(Transformer(blocks=1), fully_shard), codegen="inductor"),
        "inductor": torch.compile(shard(Transformer(blocks=1), fully_shard), backend="inductor"),
    }
    for name, model in ways.items():
        ours = train(model, steps=5)
        first = [Record(run.losses[:1], run.gradients[:1], [{}]) for run in (ours, eager)]
        assert_same(*first, rtol=1e-5)
        assert loss_distance(*first) <= 1e-6, f"{name}: {loss_distance(*first)}"
        assert loss_distance(ours, eager) <= 1e-4, f"{name}: {loss_distance(ours, eager)}"
        for distance, slack in ((loss_distance, 2e-6), (parameter_distance, 2e-5)):
            mine, limit = distance(ours, eager), distance(theirs, eager)
            assert mine <= 2 * limit + slack, f"{name}: {distance.__name__} {mine:.3g}, FSDP2 by block {limit:.3g}"


def events_in_code(code: str) -> list[Event]:
    """Launches and waits in generated code, each launch numbered, and matrix products, in order."""
    events: list[Event] = []
    launched: dict[str, int] = {}
    for line in code.splitlines():
        if call := re.search(r"torch\.ops\._c10d_functional\.(\w+)\.default\((.*)", line):
            op, arguments = call.groups()
            if op == "wait_tensor":
                (buffer,) = set(re.findall(r"\bbuf\d+\b", arguments))
                events.append(("wait", launched[buffer]))
                continue
            result = re.search(r"out=(\w+)", arguments) or re.match(r"\s*(\w+) = ", line)
            assert result, line
            launched[result.group(1)] = len(launched)
            events.append(("launch", len(launched) - 1))
        elif re.search(r"\bextern_kernels\.mm\(", line):
            events.append(("mm", 0))
    return events


def events_in_plan(graph: GraphReport) -> list[Event]:
    """The same of a planned graph."""
    events: list[Event] = []
    launched: dict[str, int] = {}
    for line in graph.planned.splitlines():
        if launch := re.search(r"(\w+) = torch\.ops\.compiled_fsdp\.launch\.default\(", line):
            count = sum(kind == "launch" for kind, _ in events)
            launched[launch.group(1)] = count
            events.append(("launch", count))
        elif (result := re.search(r"(\w+): .* = (\w+)\[0\];", line)) and result.group(2) in launched:
            launched[result.group(1)] = launched[result.group(2)]
        elif wait := re.search(r"wait_tensor\.default\((\w+)\)", line):
            events.append(("wait", launched[wait.group(1)]))
        elif "aten.mm.default(" in line:
            events.append(("mm", 0))
    return events


def products_in_flight(events: list[Event]) -> list[int]:
    """How many matrix products stand between each launch and its wait."""
    count = sum(kind == "launch" for kind, _ in events)
    places = [(events.index(("launch", i)), events.index(("wait", i))) for i in range(count)]
    return [sum(kind == "mm" for kind, _ in events[launch:wait]) for launch, wait in places]


@distributed(world_size=2)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"bucket": "module"}, id="module", marks=pytest.mark.more),
        pytest.param({}, id="auto", marks=pytest.mark.more),
        pytest.param({"bucket": "module", "hardware": SCATTERING}, id="module scattering", marks=pytest.mark.more),
    ],
)
def test_generated_code_follows_the_plan(rank, world_size, options):
    """Launches and waits in the code are where the plan has them, and what hides them stands between."""
    model = shard(small(blocks=2), fully_shard, reshard_after_forward=True)
    # without functions for what layers repeat, whose products do not stand between launches and waits in the text
    run = compiled(model, codegen="inductor", disable_passes=["share"], **options)
    _, codes = run_and_get_code(lambda: forward_backward(run, 0))
    graphs = explain(model).graphs
    assert [graph.phase for graph in graphs] == ["forward", "backward"]
    for graph, code in zip(graphs, codes, strict=True):
        in_code, in_plan = events_in_code(code), events_in_plan(graph)
        flights = [(f.launch, "launch", i) for i, f in enumerate(graph.collectives)]
        flights += [(f.wait, "wait", i) for i, f in enumerate(graph.collectives)]
        order = [(kind, i) for _, kind, i in sorted(flights)]
        assert len(order) == 2 * len(graph.plan.launches) > 0
        assert [event for event in in_plan if event[0] != "mm"] == order
        assert [event for event in in_code if event[0] != "mm"] == order, graph.phase
        assert products_in_flight(in_code) == products_in_flight(in_plan), graph.phase
        if not options:
            continue  # where the planner puts them is its own choice
        gathers = [i for i, flight in enumerate(graph.collectives) if flight.bucket.kind == "gather"]
        for this, following in pairwise(gathers):
            assert in_code.index(("launch", following)) < in_code.index(("wait", this)), graph.phase
        assert products_in_flight(in_code)[gathers[-1]] > 0, graph.phase
    reductions = [i for i, flight in enumerate(graphs[1].collectives) if flight.bucket.kind == "reduce"]
    assert not options or products_in_flight(events_in_code(codes[1]))[reductions[0]] > 0
    assert ("all_to_all_single.default(" in codes[1]) != ("hardware" in options)


@pytest.mark.more
@distributed(world_size=2)
@pytest.mark.parametrize(
    "hardware",
    [pytest.param(EXCHANGING, id="exchanging"), pytest.param(GROUPING, id="grouping", marks=pytest.mark.more)],
)
def test_every_kind_of_collective(rank, world_size, hardware):
    """All-to-alls with a local mean, several collectives for one bucket: results within rounding, each launch with its
    wait."""
    model = shard(small(blocks=2), fully_shard, reshard_after_forward=True)
    run = compiled(model, codegen="inductor", hardware=hardware)
    _, codes = run_and_get_code(lambda: forward_backward(run, 0))
    for graph, code in zip(explain(model).graphs, codes, strict=True):
        planned = [len(b.reads) if b.form == "coalesced" else 1 for b in graph.plan.launches]
        events = [event for event in events_in_code(code) if event[0] != "mm"]
        assert sorted(events) == sorted((kind, i) for kind in ("launch", "wait") for i in range(sum(planned)))
        assert (max(planned) > 1) == (hardware == GROUPING), planned
    model.zero_grad()
    ours, theirs = train(run, steps=1), fsdp2_record(small(blocks=2), steps=1)
    first = [Record(run.losses, run.gradients, [{}]) for run in (ours, theirs)]  # AdamW makes much of rounding
    assert_same(*first, rtol=1e-5)


class Tower(nn.Sequential):
    """Layers of 32 x 32: on 2 ranks a weight's shard has as many elements as an activation of 16 rows."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = [nn.Linear(32, 32) for _ in range(3)]
        super().__init__(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


@distributed(world_size=2)
def test_published_gradients_belong_to_the_user(rank, world_size):
    """What later graphs compute does not get into them, nor do they hold a whole bucket."""
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(rank))
    model, other, reference = fully_shard(Tower()), fully_shard(Tower()), torch_fully_shard(Tower())
    run, run_other = (compiled(m, codegen="inductor") for m in (model, other))
    at_hook: dict[nn.Parameter, torch.Tensor] = {}
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: at_hook.update({p: p.grad.to_local().clone()}))
    run(x).square().sum().backward()
    after_backward = [param.grad.to_local().clone() for param in model.parameters()]
    held = [run(x + 1)]
    for index in range(2):
        held.append(run_other(x + index))
        held[-1].square().sum().backward()
    reference(x).square().sum().backward()
    for param, then, theirs in zip(model.parameters(), after_backward, reference.parameters(), strict=True):
        now = param.grad.to_local()
        assert isinstance(param.grad, DTensor)
        assert torch.equal(now, at_hook[param])
        assert torch.equal(now, then)
        assert now.untyped_storage().nbytes() == 4 * now.numel()
        error = (param.grad.full_tensor() - theirs.grad.full_tensor()).abs().max()
        assert error <= 1e-5 * theirs.grad.full_tensor().abs().max()


def compile_twice(rank: int, world_size: int) -> list[tuple[list[str | None], int, int]]:
    """Of two equal models: the cache keys of their graphs, and how often Inductor's cache had a graph and had it
    not."""
    results = []
    for _ in range(2):
        torch.compiler.reset()
        counters.clear()
        model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))
        fully_shard(model[1])
        fully_shard(model)
        forward_backward(compiled(model, codegen="inductor"), 0)
        keys = [graph.cache_key for graph in explain(model).graphs]
        found = counters["inductor"]
        results.append((keys, found["fxgraph_cache_hit"], found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"]))
    return results


@pytest.mark.more
def test_compile_cache(monkeypatch):
    """On a 1-D CPU mesh all ranks have the same keys, with 61 rows on 2 ranks. The second time all are found."""
    monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
    monkeypatch.setenv("TORCH_COMPILE_CACHE_KEY_TAG", uuid.uuid4().hex)  # no graph of an earlier run
    first, second = zip(*run_ranks(compile_twice, 2), strict=True)
    keys = first[0][0]
    assert all(keys)
    assert len(set(keys)) == 2
    assert all(hits + misses == 2 for _, hits, misses in first)
    assert any(misses for _, _, misses in first)
    assert [keys for keys, *_ in first + second] == [keys] * 4
    assert [found for _, *found in second] == [[2, 0]] * 2


@pytest.mark.more
def test_no_code_is_generated_for_copies():
    """Kernels of copies into buckets and out of them would be named after no operation of the model's."""
    with fake_group(2):
        run = compiled(shard(small(blocks=2), fully_shard, reshard_after_forward=True), codegen="inductor")
        _, codes = run_and_get_code(lambda: forward_backward(run, 0))
    kernels = re.findall(r"^(cpp_fused\w*) = async_compile", "\n".join(codes), re.MULTILINE)
    assert kernels
    assert not [name for name in kernels if re.fullmatch(r"cpp_fused_\d+", name)]
    assert "sum_bucket" in codes[1]


@pytest.mark.more
@pytest.mark.parametrize("verify", ["plan", "full"])
def test_what_our_ops_give_is_asserted_where_all_is_verified(verify):
    """In each call, for each parameter, it took 3 % of the host's time."""
    with fake_group(2):
        run = compiled(shard(small(blocks=2), fully_shard), codegen="inductor", verify=verify)
        _, codes = run_and_get_code(lambda: forward_backward(run, 0))
    asserted = re.findall(r"assert_\w+\(buf.*'torch.ops.compiled_fsdp.split_bucket", "\n".join(codes))
    assert bool(asserted) == (verify == "full")
    assert re.search(r"assert_size_stride\w*\(\(?primals", codes[0])  # Inductor's own stay
