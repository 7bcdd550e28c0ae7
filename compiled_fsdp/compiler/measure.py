"""``measure_hardware``: the rates of this machine's matrix products, copies and collectives, the same on all ranks.

More than 400 lines: all ranks time the same things in the same order, and one class keeps that order.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from compiled_fsdp.base.logs import speaks_for_all
from compiled_fsdp.base.progress import stage
from compiled_fsdp.base.renamed import warn_renamed
from compiled_fsdp.base.texts import broadcast_text, gather_texts
from compiled_fsdp.buckets import collectives, transport
from compiled_fsdp.buckets.reduction import ReduceSpec
from compiled_fsdp.buckets.spec import SINGLE, BucketSpec, Kind
from compiled_fsdp.buckets.transport import GroupNames
from compiled_fsdp.compiler.hardware import device_name, float32_is_tf32, local_nodes, measured
from compiled_fsdp.compiler.samples import Measurement, Samples, cache_folder, keep, kept, samples_from_json
from compiled_fsdp.passes.cost import PROFILES, Contention, Curve, Hardware, profile_of
from compiled_fsdp.sharding.mesh import check_reshard_after_forward, mesh_of_all_ranks, post_forward_group
from compiled_fsdp.sharding.process_groups import ShardGroup

log = logging.getLogger(__name__)
speaks_for_all(log)

_VERSION = 11  # of the method of measuring; a part of the cache's key
_REPEATS = 3  # repeats of a measurement; the median counts
_ROUNDS = 12  # the fewest comparisons of compute with and without collectives; the middle half counts
_UNSURE = 0.015  # there are more comparisons until the slowdown is known this well (its standard error)
_LONGEST_COMPARISON = 12.0  # or until they have taken so many seconds
_COMPARED = 0.3  # seconds of compute in each of them, on a CPU, which switches between threads every few milliseconds
_QUEUED = 4  # the least number of collectives that are launched one after another
_MOST_QUEUED = 128
# A network with a limited rate may carry so many bytes at full speed after a pause. Only later bytes count.
_BURST = 2**24
_SIZES = tuple(2**power for power in (16, 18, 20, 22, 23, 24, 25, 26))  # bytes of a collective
_LONG_ENOUGH = 0.02  # matrices stop growing if their products take so many seconds
_STEADY = 1.0  # seconds for which products are repeated, because the speed of a shared CPU changes within tenths of one
_BESIDE = 8  # about so many gathers are in flight beside compute
_MOST_BESIDE = 64  # the most gathers in flight beside compute, because each has memory of its own
_MOST_CONTENTION = 4.0  # a larger value is a failed measurement
_TRIES = 2  # measurements of a curve that does not fit; the best one counts
_MOST_OFF = 0.3  # the largest median distance of measured times from their curve, unless something else was running
_LONGEST_COLLECTIVE = 0.06  # sizes stop growing if one collective takes so many seconds


def measure_hardware(
    mesh: DeviceMesh | None = None,
    *,
    reshard_after_forward: bool | int | None = None,
    replicates: bool = False,
    force: bool = False,
    again: bool | None = None,
) -> Hardware:
    """Measure the rates that the planner needs: of matrix products, of copies, and of the mesh's collectives.

    For example, in a training script, before the first step::

        dist.init_process_group()
        compiled_fsdp.measure_hardware()  # or measure_hardware(mesh), if fully_shard gets a mesh
        fully_shard(model)

    Every rank of the mesh must call it, before training and outside of compiled code. Later compiles with
    ``hardware="auto"`` (the default) plan with the result. Rates are those of the slowest rank. The first call takes
    about a minute. The result is cached in ``$COMPILED_FSDP_CACHE_DIR`` (by default ``~/.cache/compiled_fsdp``),
    by hosts, devices, threads, backend, torch version and whether float32 is computed in TF32. It is not cached, and a
    warning says so, if times do not fit a curve in several tries, because something else is running. The first rank
    decides whether the cache is used.

    Ranks with the same ``RANK // LOCAL_WORLD_SIZE`` are on one node (torchrun sets both). A group's measurement is used
    for all groups of as many ranks on as many nodes.

    Args:
        mesh: as given to ``fully_shard``: 1-D (by default all ranks), or 2-D with replicas first, whose all-reduce is
            also measured.
        reshard_after_forward: as given to ``fully_shard``: with an int, the gathers of its backward are measured, too.
        replicates: whether the mesh, of one dimension, is for ``replicate``: its all-reduce is also measured.
        force: measure even if the cache has a result.
        again: the old name of ``force``.

    Returns:
        The measured hardware, the same on every rank.

    Raises:
        ValueError: the mesh has more than two dimensions (with ``replicates`` more than one), or its backend does not
            communicate ("fake"); or reshard_after_forward does not fit it.
        RuntimeError: there is no process group, or the call is in compiled code.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "measure_hardware: there is no process group. Call torch.distributed.init_process_group() first (torchrun "
            "sets what it needs)."
        )
    mesh = mesh_of_all_ranks() if mesh is None else mesh
    if again is not None:
        warn_renamed("measure_hardware(again=...)", "measure_hardware(force=...)")
        force = again
    found = measure(mesh, reshard_after_forward=reshard_after_forward, replicates=replicates, force=force)
    return found.hardware


def measure(
    mesh: DeviceMesh, *, reshard_after_forward: bool | int | None = None, replicates: bool = False, force: bool = False
) -> Measurement:
    """Do the same as ``measure_hardware``, and return the times that the curves are fitted to as well."""
    if replicates and mesh.ndim != 1:
        raise ValueError(
            f"measure_hardware: with replicates the mesh must have one dimension, but has {mesh.ndim}; pass the mesh "
            "that replicate gets."
        )
    if mesh.ndim > 2:
        raise ValueError(
            f"measure_hardware: mesh must have one dimension, or two with replicas first, but has {mesh.ndim}; pass "
            "the mesh that fully_shard gets."
        )
    check_reshard_after_forward(reshard_after_forward, mesh, replicates=replicates)
    group = mesh.get_group(mesh.ndim - 1)
    if dist.get_backend(group) == "fake":
        raise ValueError(
            "measure_hardware: mesh uses the backend 'fake', which communicates nothing; use gloo or nccl."
        )
    if torch.compiler.is_compiling():
        raise RuntimeError("measure_hardware: called inside compiled code; call it once, before training.")
    device = torch.device(mesh.device_type)
    gathers_in_part = type(reshard_after_forward) is int and not replicates
    part = post_forward_group(mesh, cast("int", reshard_after_forward)) if gathers_in_part else None
    path = _cache_path(mesh, device, part, replicates=replicates)
    is_first = not any(mesh.get_coordinate() or ())
    in_cache = kept(path) if is_first and not force else None
    found, is_kept = _from_first_rank(mesh, device, *(in_cache or (None, ()))), True
    if found is None:
        # Groups of one kind may lie on nodes differently, so all ranks take the first rank's result for its groups.
        stopwatch = _Stopwatch(mesh, device, part, replicates=replicates)
        with stage("measuring the hardware"):
            hardware = stopwatch.hardware()
        found = _from_first_rank(mesh, device, hardware, stopwatch.samples)
        assert found is not None
        worst = max(found[1], key=off_by, default=None)
        if worst is not None and off_by(worst) > _MOST_OFF:
            is_kept = False
            log.warning(
                "measure_hardware: the %s times of %d ranks differ from their curve by %.0f%% (median) after %d tries, "
                "probably because other programs were running. This process plans with them, but they are not kept for "
                "later processes. Measure again when the machine is idle.",
                worst.kind, worst.ranks, 100 * off_by(worst), _TRIES,
            )  # fmt: skip
        elif is_first:
            keep(path, found[0].to_json(), _as_json(found[1]))
    measured[group] = found[0], frozenset(mesh.mesh.flatten().tolist())
    log.info("measured hardware: %s", found[0])
    return Measurement(*found, path if is_kept else None)


def _from_first_rank(
    mesh: DeviceMesh, device: torch.device, hardware: Hardware | None, samples: Sequence[Samples]
) -> tuple[Hardware, tuple[Samples, ...]] | None:
    """Return the hardware and the samples of the mesh's first rank; None if it has no hardware."""
    texts = ("" if hardware is None else hardware.to_json()), _as_json(samples)
    for inner in _groups_of(mesh):
        texts = broadcast_text(texts[0], inner, device), broadcast_text(texts[1], inner, device)
    return (Hardware.from_json(texts[0]), samples_from_json(texts[1])) if texts[0] else None


def _as_json(samples: Sequence[Samples]) -> str:
    return json.dumps([asdict(of) for of in samples])


def _groups_of(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return this rank's groups. A text that goes through all of them in this order reaches every rank of the mesh."""
    return [mesh.get_group(dim) for dim in reversed(range(mesh.ndim))]


def _cache_path(mesh: DeviceMesh, device: torch.device, part: ShardGroup | None, *, replicates: bool) -> Path:
    """Return the path of the result in the cache; its name is a hash of all that the result depends on."""
    tf32 = device.type == "cuda" and float32_is_tf32()
    host = socket.gethostname(), os.environ.get("LOCAL_WORLD_SIZE")
    everyone = json.dumps([*host, device_name(device.type), torch.get_num_threads(), os.cpu_count(), tf32])
    for group in _groups_of(mesh):
        everyone = json.dumps(gather_texts(everyone, group, device))
    ranks_in_backward = 0 if part is None else part.size
    backend = dist.get_backend(mesh.get_group(mesh.ndim - 1))
    key = (_VERSION, torch.__version__, backend, device.type, ranks_in_backward, replicates, everyone)
    return cache_folder() / f"hardware-{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.json"


def _linear_layer(x: torch.Tensor, w: torch.Tensor) -> None:
    """Compute the products of a linear layer's forward and backward."""
    x @ w.t()
    x @ w
    x.t() @ w


class _Stopwatch:
    """Times operations on all ranks at once. A time is the slowest rank's, and so the same on all ranks."""

    def __init__(
        self, mesh: DeviceMesh, device: torch.device, part: ShardGroup | None, *, replicates: bool = False
    ) -> None:
        self.groups, self.device = _groups_of(mesh), device
        self.shards, *self.replicas = self.groups
        self.replicas += [self.shards] if replicates else []
        # The group whose collectives run beside compute to measure contention.
        self.widest = max(self.groups, key=lambda group: group.size())
        self.part = None if part is None else part.process_group
        self.ranks = mesh.size()
        self.samples: list[Samples] = []

    def hardware(self) -> Hardware:
        base = profile_of(device_name(self.device.type)) or PROFILES["h100"]
        with stage("products and copies"):
            flops = {name: self._matmul(getattr(torch, name)) for name in ("float32", "bfloat16")}
            copy = self._copy()
        grouped, communicates = base.each, self.widest.size() > 1
        if self.device.type == "cpu" and communicates:  # gloo does not group collectives
            grouped = fit(*self._times(self._gather, self.widest)).latency

        def curves(kind: str, *groups: dist.ProcessGroup | None) -> dict[tuple[int, int], Curve]:
            found = {}
            for group in groups:
                if group is not None and group.size() > 1:
                    nodes = local_nodes(base, dist.get_process_group_ranks(group))
                    with stage(f"collectives: {kind}"):
                        samples = self._samples(kind, group, nodes)
                    self.samples.append(samples)
                    found[group.size(), nodes] = replace(fit(samples.sizes, samples.seconds), each=grouped)
            return found

        return replace(
            base,
            name=f"{device_name(self.device.type)}, measured with {self.ranks} ranks",
            flops={**flops, "float16": flops["bfloat16"], "float64": flops["float32"] / 2},
            copy=copy,
            contention=self._contention() if communicates else Contention(),
            each=grouped,
            host_collective=self._host_collective() if communicates else base.host_collective,
            gather=curves("gather", self.shards, self.part),
            reduce=curves("reduce", self.shards),
            alltoall=curves("alltoall", self.shards) if self.device.type == "cpu" else {},
            all_reduce=curves("all_reduce", *self.replicas),
        )

    def _samples(self, kind: str, group: dist.ProcessGroup, nodes: int) -> Samples:
        """Return times that fit a curve, or the best ones of several tries; all ranks see the same times."""
        tries: list[Samples] = []
        while not tries or (off_by(tries[-1]) > _MOST_OFF and len(tries) < _TRIES):
            tries.append(Samples(kind, group.size(), nodes, *self._times(self._runs[kind], group)))
        return min(tries, key=off_by)

    @property
    def _runs(self) -> dict[str, Callable[..., None]]:
        """The function that runs a collective, by kind."""
        return {
            "gather": self._gather,
            "reduce": self._reduce,
            "alltoall": self._exchange,
            "all_reduce": self._all_reduce,
        }

    # ---- times -------------------------------------------------------------------------------------------------------
    def seconds(self, run: Callable[[], Any], repeats: int = _REPEATS) -> float:
        """Return the median time of ``run()`` in seconds, on the slowest rank."""
        run()
        return self._slowest(statistics.median(self._once(run) for _ in range(repeats)))

    def _once(self, run: Callable[[], Any]) -> float:
        """Return the time of ``run()`` in seconds, on this rank."""
        self._settle()
        start = time.perf_counter()
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        for group in self.groups:
            dist.barrier(group)

    def _slowest(self, seconds: float) -> float:
        worst = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        for group in self.groups:
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
        return float(worst)

    # ---- the device --------------------------------------------------------------------------------------------------
    def _matmul(self, dtype: torch.dtype) -> float:
        """Return floating-point operations per second, in the products of a linear layer's forward and backward."""
        for n in (8192,) if self.device.type == "cuda" else (256, 512, 1024):  # CPUs differ in speed, most in bfloat16
            x, w = (torch.randn(n, n, device=self.device, dtype=dtype) for _ in range(2))
            seconds = self.seconds(partial(_linear_layer, x, w))
            if seconds > _LONG_ENOUGH:
                break
        repeats = max(_REPEATS, math.ceil(_STEADY / seconds))
        return 3 * 2 * n**3 / self.seconds(partial(_linear_layer, x, w), repeats)

    def _copy(self) -> float:
        """Return bytes per second, read and written, of a copy into fresh memory."""
        size = 2**28 if self.device.type == "cuda" else 2**25
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return 2 * size / self.seconds(source.clone)

    def _contention(self) -> Contention:
        """Return how much gathers slow down compute, and compute gathers, in the dtype that the device trains in."""
        with stage("compute beside collectives"):
            return self._contention_of_kernels()

    def _contention_of_kernels(self) -> Contention:
        n, dtype = (4096, torch.bfloat16) if self.device.type == "cuda" else (768, torch.float32)
        x = torch.randn(n, n, device=self.device, dtype=dtype)
        product, collective = self._slow_each_other(lambda: x @ x)
        # Into memory that is there already: fresh memory takes a CPU many page faults, whose time varies.
        size = 2**28 if self.device.type == "cuda" else 2**26
        source, target = (torch.zeros(size, device=self.device, dtype=torch.uint8) for _ in range(2))
        memory, _ = self._slow_each_other(lambda: target.copy_(source))
        return Contention(product, product, memory, collective)

    def _slow_each_other(self, kernel: Callable[[], Any]) -> tuple[float, float]:
        """Return the shares by which ``kernel`` takes longer beside gathers, and gathers beside it."""
        repeats = 8 if self.device.type == "cuda" else math.ceil(_COMPARED / self.seconds(kernel))

        def compute() -> None:
            for _ in range(repeats):
                kernel()

        quick = self.seconds(compute)
        gather = partial(self._gather, self.widest)
        # Several gathers in a row: each begins with a copy of this rank's shard, which must not count for all its time.
        long = quick / _BESIDE
        size = next((s for s in _SIZES if self.seconds(partial(gather, s, _QUEUED), 1) > _QUEUED * long), _SIZES[-1])
        seconds = self.seconds(partial(gather, size, _QUEUED), 1) / _QUEUED
        count = gathers_beside(quick, seconds)
        while True:
            slowed, done = self._beside(compute, size, count)
            if done > slowed + seconds / 2 or 2 * count > _MOST_BESIDE:
                break
            count *= 2  # the gathers ended before compute: a network may carry the first ones quicker
        gathers = statistics.median(self._beside(lambda: None, size, count)[1] for _ in range(_REPEATS))
        shares: list[float] = []
        ends: list[float] = []
        taken, alone = 0.0, self._slowest(self._once(compute))
        # The times are the same on all ranks, so all ranks stop after the same round.
        while len(shares) < _ROUNDS or (unsure(shares) > _UNSURE and taken < _LONGEST_COMPARISON):
            before = alone
            slowed, done = self._beside(compute, size, count)
            alone = self._slowest(self._once(compute))
            shares.append(2 * slowed / (before + alone))  # before and after, because a machine's speed changes
            ends.append(done)
            taken += done + alone
        share = middle(shares)
        return contention(1.0, share), contention_of_collectives(gathers, share * quick, middle(ends))

    def _beside(self, compute: Callable[[], Any], size: int, count: int) -> tuple[float, float]:
        """Return the seconds until compute beside ``count`` gathers is done, and until the gathers are done.

        Some gathers are waited for before: they use up what a network carries at full speed after a pause.
        """
        self._settle()
        first = min(math.ceil(_BURST / size), _MOST_BESIDE)
        pending = [self._launch_gather(self.widest, size) for _ in range(first + count)]
        for bucket in pending[:first]:
            transport.wait(bucket)
        self._wait_for_compute()
        start = time.perf_counter()
        compute()
        self._wait_for_compute()
        slowed = time.perf_counter() - start
        for bucket in pending[first:]:
            transport.wait(bucket)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return self._slowest(slowed), self._slowest(time.perf_counter() - start)

    def _wait_for_compute(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    # ---- collectives -------------------------------------------------------------------------------------------------
    def _launch_gather(self, group: dist.ProcessGroup, size: int) -> torch.Tensor:
        shard = torch.zeros(size // 4 // group.size(), device=self.device)
        return self._launch(Kind.GATHER, "all_gather", shard, shard.numel(), group)

    def _launch(self, kind: Kind, by: str, tensor: torch.Tensor, numel: int, group: dist.ProcessGroup) -> torch.Tensor:
        spec = BucketSpec(kind, SINGLE, by, group.size(), (numel,), dims=(0,), reduce=str(ReduceSpec()))
        names = replace(GroupNames.one(group.group_name), replicate=group.group_name)
        (bucket,) = collectives.launch([tensor], (), spec, names)
        return bucket

    def _gather(self, group: dist.ProcessGroup, size: int, count: int) -> None:
        for bucket in [self._launch_gather(group, size) for _ in range(count)]:
            transport.wait(bucket)

    def _reduce(self, group: dist.ProcessGroup, size: int, count: int, exchange: bool = False) -> None:
        numel, by = size // 4 // group.size(), "all_to_all" if exchange else "reduce_scatter"
        grads = [torch.zeros(numel * group.size(), device=self.device) for _ in range(count)]
        for bucket in [self._launch(Kind.REDUCE, by, grad, numel, group) for grad in grads]:
            transport.wait(bucket)

    def _exchange(self, group: dist.ProcessGroup, size: int, count: int) -> None:
        self._reduce(group, size, count, exchange=True)

    def _all_reduce(self, group: dist.ProcessGroup, size: int, count: int) -> None:
        pieces = [torch.zeros(size // 4, device=self.device) for _ in range(count)]
        for bucket in [self._launch(Kind.REDUCE, "all_reduce_shards", piece, piece.numel(), group) for piece in pieces]:
            transport.wait(bucket)

    def _host_collective(self) -> float:
        """Return the host's seconds to launch a collective, and to wait for one that is done."""
        times = []
        for _ in range(_REPEATS):
            self._settle()
            start = time.perf_counter()
            pending = [self._launch_gather(self.widest, _SIZES[0]) for _ in range(_QUEUED)]
            launched = time.perf_counter() - start
            self._settle()
            start = time.perf_counter()
            for bucket in pending:
                transport.wait(bucket)
            times.append((launched + time.perf_counter() - start) / _QUEUED)
        return self._slowest(statistics.median(times))

    def _times(self, run: Callable[..., None], group: dist.ProcessGroup) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Return sizes in bytes, and for each the seconds of one more collective after others."""
        sizes, times = [], []
        for size in _SIZES:
            alone = self.seconds(partial(run, group, size, 1))
            few = max(1, min(_BURST // size, _MOST_QUEUED // 2))
            more = max(2 * few, _QUEUED)
            quick = alone if few == 1 else self.seconds(partial(run, group, size, few), 2)
            queued = self.seconds(partial(run, group, size, more), 2)
            sizes.append(size)
            # On a busy machine, fewer collectives may take longer than more. Then take their average, latency included.
            times.append((queued - quick) / (more - few) if queued > quick else queued / more)
            if alone > _LONGEST_COLLECTIVE:
                break
        return tuple(sizes), tuple(times)


def off_by(samples: Samples) -> float:
    """Return the median distance of measured times from their curve, as a share of the curve's time."""
    return statistics.median(map(abs, samples.residuals(fit(samples.sizes, samples.seconds))))


def middle(values: Sequence[float]) -> float:
    """Return the mean of the middle half of some values: steadier than their median, and no outlier counts."""
    ordered, cut = sorted(values), len(values) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def unsure(values: Sequence[float]) -> float:
    """Return the standard error of ``middle(values)``, from the range of the middle half, as for a normal distribution.

    There the range is 1.35 standard deviations, and the error is 1.09 of them over the root of the number of values.
    """
    low, _, high = statistics.quantiles(values, n=4)
    return 1.09 / 1.35 * (high - low) / math.sqrt(len(values))


def gathers_beside(compute: float, gather: float) -> int:
    """Return how many gathers of ``gather`` seconds are in flight for longer than ``compute`` seconds of compute.

    Compute takes longer beside gathers, so half as much time again is added.
    """
    return min(max(math.ceil(1.5 * compute / gather), 2), _MOST_BESIDE)


def contention(alone: float, slowed: float) -> float:
    """Return the share by which compute takes longer while a collective is in flight.

    Args:
        alone: seconds of compute without a collective.
        slowed: seconds of the same compute beside collectives.
    """
    return min(max(slowed / alone - 1, 0.0), _MOST_CONTENTION)


def contention_of_collectives(alone: float, beside: float, done: float) -> float:
    """Return the share by which collectives take longer beside compute.

    In the first ``beside`` seconds ``beside / (1 + share)`` seconds of them are done, and then the rest at full speed.

    Args:
        alone: seconds of all collectives without compute.
        beside: seconds for which compute runs beside the first of them.
        done: seconds until all of them are done.
    """
    speed = 1 - (done - alone) / beside  # of the collectives beside compute
    return min(max(1 / speed - 1, 0.0), _MOST_CONTENTION) if speed > 0 else _MOST_CONTENTION


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Curve:
    """Return the line through times by size that is nearest to all of them, with a latency of at least zero.

    Nearest means the smallest sum of ``abs(log(line / time))``, so that one wrong time, too short or too long, does not
    move the line. Such a line goes through two of the times, or through one of them and zero.
    """
    x, y = np.array(sizes, dtype=float), np.array(seconds, dtype=float)
    lines = [(0.0, took / size) for size, took in zip(x, y, strict=True)]
    for i, j in itertools.combinations(range(len(x)), 2):
        slope = (y[j] - y[i]) / (x[j] - x[i])
        lines.append((y[i] - slope * x[i], slope))
    possible = [(latency, slope) for latency, slope in lines if latency >= 0 and slope > 0]
    latency, slope = min(possible, key=lambda line: np.abs(np.log((line[0] + line[1] * x) / y)).sum())
    return Curve(float(latency), 1 / float(slope))
