"""Measured hardware: agreed on by all ranks, cached, and planned for by "auto"."""

import logging
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from compiled_fsdp import explain, fully_shard, measure_hardware, replicate
from compiled_fsdp.base import logs
from compiled_fsdp.compiler import measure
from compiled_fsdp.compiler.measure import contention, fit, gathers_beside, unsure
from compiled_fsdp.compiler.samples import Samples
from compiled_fsdp.passes.cost import Contention
from tests.harness import batch, compiled, distributed, shard
from tests.harness.fake import fake_group
from tests.harness.meshes import mesh_2d
from tests.harness.models import small


@pytest.mark.more
@distributed(world_size=2)
def test_measured_once_and_the_same_on_every_rank(rank, world_size):
    """The first call measures, the second finds the cache; a rank's own clock decides nothing."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    os.environ["COMPILED_FSDP_CACHE_DIR"] = folder[0]
    mesh = init_device_mesh("cpu", (world_size,))
    compiled(shard(small(), fully_shard))(batch(rank, 0)[0])  # planned for the profile
    torch.compiler.reset()
    with mock.patch.multiple(measure, _SIZES=measure._SIZES[:3], _MOST_OFF=1e9):
        first = measure_hardware()  # of all ranks, which is the mesh's group, too
    everyone: list[object] = [None] * world_size
    dist.all_gather_object(everyone, first)
    assert everyone == [first] * world_size
    for curves in (first.gather, first.reduce, first.alltoall):
        assert list(curves) == [(world_size, 1)]
        assert curves[world_size, 1].bytes_per_second > 1e6
        assert curves[world_size, 1].latency >= 0
    assert first.matmul("float32") > 1e8
    assert 0 < first.host_collective < 1
    assert len(list(Path(folder[0]).glob("*.json"))) == 1
    assert measure_hardware(mesh) == first
    # rank 0's cache decides: another file there, and both ranks have it
    (path,) = Path(folder[0]).glob("*.json")
    dist.barrier()
    if rank == 0:
        path.write_text(replace(first, name="changed").to_json())
    dist.barrier()
    assert measure_hardware(mesh).name == "changed"
    # and "auto" plans for it, not for the earlier measurement
    model = shard(small(), fully_shard)
    compiled(model)(batch(rank, 0)[0]).sum().backward()
    forward = explain(model).graphs[0]
    assert forward.tasks is not None
    channel = forward.tasks.channels["gather mesh 0 float32"]
    assert channel.latency == first.gather[world_size, 1].latency
    assert "times are planned for changed (measured)" in str(explain(model))


def test_a_mesh_that_cannot_be_measured():
    with fake_group(4):
        with pytest.raises(ValueError, match="measure_hardware: mesh uses the backend 'fake'"):
            measure_hardware(init_device_mesh("cpu", (4,)))
        with pytest.raises(ValueError, match="mesh must have one dimension, or two with replicas first, but has 3"):
            measure_hardware(init_device_mesh("cpu", (2, 2, 1)))
        with pytest.raises(ValueError, match="reshard_after_forward as an int should be a factor of 4, not 3"):
            measure_hardware(init_device_mesh("cpu", (4,)), reshard_after_forward=3)
        with pytest.raises(ValueError, match="with replicates the mesh must have one dimension, but has 2"):
            measure_hardware(init_device_mesh("cpu", (2, 2)), replicates=True)


@pytest.mark.more
@distributed(world_size=4)
def test_groups_inside_of_machines_and_between_them(rank, world_size):
    """Two machines of two ranks, as LOCAL_WORLD_SIZE has it: of each kind of group a curve of its own, which its
    collectives are planned with; the same on all ranks of the mesh, though half of them measure another group."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    of_machines = {"COMPILED_FSDP_CACHE_DIR": folder[0], "LOCAL_WORLD_SIZE": "2"}
    with (
        mock.patch.dict(os.environ, of_machines),
        mock.patch.multiple(measure, _SIZES=measure._SIZES[:2], _MOST_OFF=1e9),
    ):
        mesh = mesh_2d("replicas", "shards")
        hybrid = measure_hardware(mesh)
        assert list(hybrid.gather) == list(hybrid.reduce) == list(hybrid.alltoall) == [(2, 1)]
        assert list(hybrid.all_reduce) == [(2, 2)]
        whole = init_device_mesh("cpu", (world_size,))
        inside = measure_hardware(whole, reshard_after_forward=2)
        assert list(inside.gather) == [(4, 2), (2, 1)]
        assert (list(inside.reduce), list(inside.all_reduce)) == ([(4, 2)], [])
        everyone: list[object] = [None] * world_size
        dist.all_gather_object(everyone, (hybrid, inside))
        assert everyone == [(hybrid, inside)] * world_size
        assert len(list(Path(folder[0]).glob("*.json"))) == 2
        assert measure_hardware(mesh) == hybrid

        model = shard(small(), fully_shard, mesh=mesh)
        compiled(model)(batch(rank, 0)[0]).sum().backward()
        (reduces,) = (c for name, c in explain(model).graphs[1].tasks.channels.items() if name.startswith("reduce"))
        assert reduces.latency >= hybrid.all_reduce[2, 2].latency
        model = shard(small(), fully_shard, mesh=whole, reshard_after_forward=2)
        compiled(model)(batch(rank, 0)[0]).sum().backward()
        channels = [graph.tasks.channels for graph in explain(model).graphs]
        assert channels[0]["gather mesh 0 float32"].latency == inside.gather[4, 2].latency
        assert channels[1]["gather mesh 1 float32"].latency == inside.gather[2, 1].latency

        alike = measure_hardware(whole, replicates=True)
        assert list(alike.all_reduce) == [(4, 2)]
        model = shard(small(), replicate, mesh=whole)
        compiled(model)(batch(rank, 0)[0]).sum().backward()
        (reduces,) = explain(model).graphs[1].tasks.channels.values()
        assert (reduces.transport, reduces.latency) == ("all_reduce", alike.all_reduce[4, 2].latency)

        measure_hardware(mesh["shards"])
        torch.compiler.reset()
        model = shard(small(), fully_shard, mesh=mesh)
        with pytest.raises(
            ValueError, match=r"with a mesh of ranks \d, \d, but the model is on a mesh of ranks 0, 1, 2, 3"
        ):
            compiled(model)(batch(rank, 0)[0])


def test_without_a_measurement_a_log_line_names_the_profile(caplog):
    logs._logged.clear()
    with fake_group(2), caplog.at_level(logging.INFO, "compiled_fsdp"):
        compiled(fully_shard(torch.nn.Linear(4, 4)))(torch.ones(2, 4))
    assert "planning for cpu: built-in profile, not measured" in caplog.text


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match=r"measure_hardware: there is no process group. Call .*init_process_group"):
        measure_hardware()


def test_a_line_is_found_again():
    sizes = [2**power for power in range(16, 26)]
    curve = fit(sizes, [3e-4 + size / 2e8 for size in sizes])
    assert curve.latency == pytest.approx(3e-4)
    assert curve.bytes_per_second == pytest.approx(2e8)
    assert fit([1000, 2000], [1.0, 3.0]).latency == 0  # a line through these would begin below zero


@pytest.mark.parametrize("wrong", range(6))
@pytest.mark.parametrize("factor", [1e-6, 0.3, 5.0])
def test_a_line_with_one_wrong_time(wrong, factor):
    """As a network gives that carries a few bytes quicker after a pause, or a machine that does something else."""
    sizes = [2**power for power in (16, 18, 20, 22, 24, 25)]
    seconds = [3e-4 + size / 2e8 for size in sizes]
    seconds[wrong] *= factor
    curve = fit(sizes, seconds)
    assert curve.bytes_per_second == pytest.approx(2e8, rel=0.05)
    if wrong > 0:  # without the smallest one little is known about latency
        assert curve.latency == pytest.approx(3e-4)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_contention_is_of_compute_that_has_gathers_beside_it_all_the_time(share, monkeypatch):
    """A network carries the first gathers quicker than those that were timed: until more are launched none is left."""
    counts = []

    def beside(self, compute, size, count):
        counts.append(count)
        return (1.0, 1.0) if count < 40 else (1 + share, 2 + share)

    monkeypatch.setattr(measure._Stopwatch, "_beside", beside)
    monkeypatch.setattr(measure._Stopwatch, "seconds", lambda self, run, repeats=3: 1.0)
    monkeypatch.setattr(measure._Stopwatch, "_once", lambda self, run: 1.0)
    with fake_group(2):
        stopwatch = measure._Stopwatch(init_device_mesh("cpu", (2,)), torch.device("cpu"), None)
        assert stopwatch._slow_each_other(lambda: None)[0] == pytest.approx(share)
    assert counts == sorted(counts)
    assert counts[-1] >= 40
    assert measure.middle([3.0, 1.0, 2.0, 100.0, 2.5, 0.0, 1.5, 4.0]) == 2.25
    assert 0 == contention(1.0, 0.9) < contention(1.0, 1.5) < contention(1.0, 1e9) < 10


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_contention_of_collectives(share):
    """Of 6 s of gathers, 4 s of compute beside them let some be done; the rest takes as long as alone."""
    done = 4 + (6 - 4 / (1 + share))
    assert measure.contention_of_collectives(6.0, 4.0, done) == pytest.approx(share)
    assert measure.contention_of_collectives(6.0, 4.0, 5.9) == 0
    assert measure.contention_of_collectives(6.0, 4.0, 20.0) == measure._MOST_CONTENTION


def test_gathers_are_in_flight_for_as_long_as_the_compute():
    """On an H100 64 MB take 0.2 ms, and eight products of 2048 x 2048 in float32 take 2.7 ms."""
    assert gathers_beside(2.7e-3, 0.2e-3) * 0.2e-3 > 1.4 * 2.7e-3
    assert gathers_beside(1e-3, 1.0) == 2
    assert gathers_beside(1.0, 1e-9) < 100  # each has memory of its own


def test_how_well_a_middle_is_known():
    """Of 400 normal numbers with a deviation of 0.1 the mean of the middle half is off by about 0.1 * 1.09 / 20."""
    values = [0.1 * NormalDist().inv_cdf((i + 0.5) / 400) for i in range(400)]
    assert unsure(values) == pytest.approx(0.00545, rel=0.02)


@distributed(world_size=2)
def test_times_of_a_busy_machine_are_not_kept(rank, world_size):
    """It measures several times, then says so, and keeps nothing; what a later try finds is kept."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    sizes = measure._SIZES[:6]
    straight = tuple(size * 1e-9 for size in sizes)
    wild = tuple(took * (10 if number % 2 else 1) for number, took in enumerate(straight))
    tries = []

    def times(self, run, group):
        tries.append(group)
        return sizes, wild if busy else straight

    assert measure.off_by(Samples("gather", 2, 1, sizes, straight)) < 1e-6
    rates = dict.fromkeys(("_matmul", "_copy", "_host_collective"), lambda *_: 1.0)
    rates["_contention"] = lambda *_: Contention()
    with (
        mock.patch.dict(os.environ, {"COMPILED_FSDP_CACHE_DIR": folder[0]}),
        mock.patch.multiple(measure._Stopwatch, _times=times, **rates),
        mock.patch.object(measure.log, "warning") as warning,
    ):
        mesh, busy = init_device_mesh("cpu", (world_size,)), True
        found = measure.measure(mesh)
        assert found.path is None
        assert len(tries) == 1 + 3 * measure._TRIES  # what is grouped; gathers, reductions, exchanges
        assert "other programs were running" in warning.call_args.args[0]
        assert not list(Path(folder[0]).iterdir())
        dist.barrier()
        busy = False
        assert measure.measure(mesh).path is not None
        warning.assert_called_once()
