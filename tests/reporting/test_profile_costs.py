"""Costs that a profile measures: names of kernels, contention, curves, and the plans of the next compile."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from unittest import TestCase, mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from compiled_fsdp import Options, explain, fully_shard, profile
from compiled_fsdp.base import logs as once
from compiled_fsdp.compat.profiling import ProfiledEvent, profiled_events
from compiled_fsdp.compiler.hardware import log
from compiled_fsdp.passes.cost import PROFILES, Contention, Curve, Hardware
from compiled_fsdp.passes.cost.compute import LibraryKernel, library_kernels, node_costs
from compiled_fsdp.tools.profile_costs import _computing, _curve_of, _Point, _shares, _with_rates, _without, fitted
from compiled_fsdp.tools.profile_kernels import kernel_calls
from compiled_fsdp.tools.profile_recorder import ProfileError, Run, Span
from compiled_fsdp.tools.profile_steps import Step
from compiled_fsdp.tools.profile_times import TimedSpan, union
from tests.harness import compiled, distributed, variants
from tests.harness.fake import fake_group

CPU = PROFILES["cpu"]


# ---- names of kernels ------------------------------------------------------------------------------------------------
def computes(x, w, b, q):
    """One library kernel of each kind."""
    y = torch.addmm(b, x, w).relu()
    z = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, True)[0]
    c = torch.ops.aten.convolution(q, q[:, :, :3, :3].contiguous(), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    return y, torch.bmm(z[0], z[0].transpose(1, 2)), torch.mm(y.bfloat16(), w.t().bfloat16()), c


INPUTS = [torch.randn(16, 8), torch.randn(8, 4), torch.randn(4), torch.randn(2, 2, 6, 4)]


@pytest.mark.parametrize("inductor", variants([False, True], False))
def test_a_graph_and_the_profiler_give_a_kernel_the_same_name(inductor):
    gm = make_fx(computes, tracing_mode="fake")(*INPUTS)
    run = torch.compile(computes) if inductor else gm
    run(*INPUTS)
    with torch_profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        run(*INPUTS)
    planned = library_kernels(node_costs(gm, fused=False), CPU)
    calls = kernel_calls(profiled_events(profiled))
    assert {call.key for call in calls} == {kernel.key for kernel in planned}
    assert "mm 16x8 8x4 float32" in {kernel.key for kernel in planned}  # an addmm
    assert all(call.seconds_ns == call.ran[1] - call.ran[0] > 0 for call in calls)


def test_kernels_on_a_device_have_the_time_of_the_device():
    """The first op launches two kernels, the second one from inside of another op; the host's times do not count."""

    def op(name, start, end, number, shapes):
        return ProfiledEvent(name, start, end, 1, False, True, (0, 0), number, 0, -1, shapes, "bfloat16")

    def kernel(start, end, launched_by):
        return ProfiledEvent("", start, end, 0, False, False, (0, 7), 0, launched_by, -1)

    shapes = (8, 4), (4, 2)
    events = [
        op("aten::mm", 0, 10, 1, shapes), op("aten::addmm", 10, 20, 2, ((2,), *shapes)),
        op("aten::mm", 12, 18, 3, shapes), op("aten::mm", 20, 30, 4, shapes),
        kernel(5, 25, 1), kernel(30, 40, 1), kernel(40, 60, 3),
    ]  # fmt: skip
    calls = kernel_calls(sorted(events, key=lambda event: event.start_ns))
    assert [(call.key, call.ran, call.seconds_ns) for call in calls] == [
        ("mm 8x4 4x2 bfloat16", (5, 40), 30),
        ("mm 8x4 4x2 bfloat16", (40, 60), 20),
    ]


# ---- figures ---------------------------------------------------------------------------------------------------------
@given(st.floats(0.0, 3.0), st.floats(0.0, 1.0), st.floats(1e-3, 10.0))
def test_contention_is_taken_off(share, part, alone):
    """Something that takes ``alone`` seconds runs beside others for a part of its work."""
    together = part * alone * (1 + share)
    measured = (1 - part) * alone + together
    assert measured * _without(share, together / measured) == pytest.approx(alone)


def test_intervals_are_united():
    assert union([(5, 9), (0, 3), (3, 4), (6, 7)]) == [(0, 4), (5, 9)]


def test_collectives_at_once_share_the_wires_by_size():
    """A small one waits behind a large one; then it runs alone for 2 ns."""
    shares = _shares([(0.0, 10.0), (4.0, 12.0), (20.0, 21.0)], [99, 1, 5])
    assert shares == [pytest.approx(1e-9 * t) for t in (4 + 6 * 0.99, 6 * 0.01 + 2, 1.0)]


CURVE = Curve(latency=1e-4, bytes_per_second=1e9, each=1e-5)


@given(st.floats(0.2, 5.0), st.floats(0.2, 5.0))
def test_a_curve_goes_through_collectives_of_several_sizes(longer, slower):
    points = [
        _Point(size, further, longer * (CURVE.latency + further * CURVE.each) + slower * size / CURVE.bytes_per_second)
        for size, further in [(10**3, 0), (10**5, 3), (10**7, 0)]
    ]
    found = fitted(CURVE, points)
    assert (found.latency, found.each) == pytest.approx((longer * CURVE.latency, longer * CURVE.each))
    assert found.bytes_per_second == pytest.approx(CURVE.bytes_per_second / slower)


@given(st.lists(st.tuples(st.integers(1, 10**9), st.integers(0, 9), st.floats(1e-6, 10.0)), min_size=1, max_size=6))
def test_any_collectives_give_a_curve(points):
    """Without room for a negative latency: both of its numbers change by the same factor instead."""
    found = fitted(CURVE, [_Point(*point) for point in points])
    assert found.latency > 0
    assert found.bytes_per_second > 0


@pytest.mark.parametrize(
    ("kind", "transport", "curve"),
    [
        ("gather", "", "gather"), ("reduce", "all_to_all", "alltoall"), ("all_reduce", "", "all_reduce"),
        ("reduce", "symm_mem_reduce_scatter", None), ("question", "", None),
    ],
)  # fmt: skip
def test_the_curve_that_a_collective_tells_about(kind, transport, curve):
    """Copy engines have costs of their own, which no profile measures."""
    bucket = SimpleNamespace(
        of=SimpleNamespace(kind=kind), planned=SimpleNamespace(bucket=SimpleNamespace(transport=transport))
    )
    assert _curve_of(bucket) == curve


def test_rates_follow_from_the_kernels_that_were_planned_by_rates():
    kernels = [
        LibraryKernel("mm a", "product", "float32", 2, 1.0),
        LibraryKernel("mm b", "product", "float32", 1, 2.0),
        LibraryKernel("attention", "attention", "float32", 1, 1.0),
        LibraryKernel("known", "product", "float32", 1, 1.0),
    ]
    hardware = replace(CPU, kernels={"known": 1.0})
    times = {"mm a": 3.0, "mm b": 2.0, "attention": 1.0, "known": 100.0}
    found = _with_rates(hardware, times, {kernel.key: kernel for kernel in kernels})
    assert found.flops["float32"] == pytest.approx(CPU.flops["float32"] * 4.0 / 8.0)
    # attention took as long as planned, and its rate is a share of the rate of products
    assert found.attention == (pytest.approx(2 * CPU.attention[0]), CPU.attention[1])


# ---- a profile, and the next compile ---------------------------------------------------------------------------------
class Layers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(16, 16) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = x + layer(x).relu()
        return x


def trained(batch: int, hardware: object) -> tuple[nn.Module, nn.Module]:
    model = Layers()
    for layer in model:
        fully_shard(layer)
    run = compiled(fully_shard(model), hardware=hardware)
    for _ in range(2):
        run(torch.randn(batch, 16)).sum().backward()
    return model, run


@contextlib.contextmanager
def warns(*texts: str, nothing: bool = False) -> Iterator[None]:
    """Check which warnings about the hardware are logged."""
    logs = TestCase().assertNoLogs(log, "WARNING") if nothing else TestCase().assertLogs(log, "WARNING")
    with mock.patch.object(once, "_logged", set()), logs as caught:
        yield
    assert all(any(text in line for line in caught.output) for text in texts)


@distributed(world_size=2, reset=True)
def test_the_next_compile_plans_with_measured_costs(rank, world_size, tmp_path):
    hardware = replace(CPU, contention=Contention(0.5, 0.5, 0.5, 0.5))
    model, run = trained(8, hardware)
    with profile(model) as p:
        for _ in range(3):
            run(torch.randn(8, 16)).sum().backward()
    costs = p.costs
    everyone = [None] * world_size
    dist.all_gather_object(everyone, costs.to_json())
    assert everyone[0] == everyone[1]
    graphs = explain(model).graphs
    keys = {kernel.key for graph in graphs for kernel in graph.kernels}
    assert costs.kernels.keys() == keys != set()
    assert all(seconds > 0 for seconds in costs.kernels.values())
    assert (costs.device, costs.name) == ("cpu", "cpu, measured in a profile")
    assert costs.contention == hardware.contention
    assert {(kind, group) for kind in ("gather", "alltoall", "reduce") for group in getattr(costs, kind)} >= {
        ("gather", (2, 1))
    }

    file = tmp_path / f"{rank}.json"
    file.write_text(costs.to_json())
    assert Options(hardware=str(file)).hardware == costs
    with warns(nothing=True):
        again, run = trained(8, str(file))
    for graph in explain(again).graphs:
        assert {kernel.key: kernel.seconds for kernel in graph.kernels}.items() <= costs.kernels.items()
        assert graph.hardware == "cpu, measured in a profile (the option 'hardware')"
        assert graph.tasks.copy_seconds == 2 / costs.copy != 2 / hardware.copy
        gathers = [channel for name, channel in graph.tasks.channels.items() if name.startswith("gather")]
        assert [channel.latency for channel in gathers] == [costs.gather[2, 1].latency] * len(gathers) != []
    with profile(again) as p:  # measures the costs of a plan that has measured costs
        run(torch.randn(8, 16)).sum().backward()
    assert p.costs.name == costs.name
    with warns("has no measured time for 3 of the 3 library kernels of the forward graph"):
        trained(4, costs)
    with warns("measured on NVIDIA H100, but the model computes on cpu"):
        trained(8, replace(costs, device="NVIDIA H100"))


def test_a_file_that_is_not_there_or_holds_something_else(tmp_path):
    with pytest.raises(ValueError, match=r"option 'hardware': the file .*nowhere\.json.* No such file"):
        Options(hardware=str(tmp_path / "nowhere.json"))
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match=r"option 'hardware': the file .*other\.json"):
        Options(hardware=tmp_path / "other.json")
    bad = replace(CPU, kernels={"mm": -1.0}).to_json()
    with pytest.raises(ValueError, match="a time below it"):
        Hardware.from_json(bad)


def test_graphs_that_were_planned_for_different_hardware():
    """A profile has no costs then, but all other figures."""
    with fake_group(1):
        model = nn.Sequential(Layers(), Layers())
        for part, hardware in zip(model, (CPU, replace(CPU, name="other", copy=1e9)), strict=True):
            fully_shard(part)
            part.compile(backend="compiled_fsdp", options={"codegen": "aot_eager", "hardware": hardware})
        fully_shard(model)
        x = torch.randn(2, 16)
        model(x).sum().backward()
        with profile(model) as p:
            with pytest.raises(RuntimeError, match="read costs after leaving"):
                _ = p.costs
            model(x).sum().backward()
        with pytest.raises(ProfileError, match=r"planned for different hardware \(cpu, other\)"):
            _ = p.costs
        assert p.result.steps


def test_kernels_of_an_optimizer_do_not_count_as_the_graphs():
    """On a GPU the compute stream runs other code, too."""
    run = Run(mock.Mock(), "forward", compiled_inside=False, to_come=[])
    step = Step(0, (TimedSpan(Span("run", "forward", False, 0, run), 10, 20),), (), ((12, 30), (30, 90)), (11, 25))
    assert _computing(step) == pytest.approx(18e-9)
