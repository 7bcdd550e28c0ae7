"""Measure a training step of a Llama stack in bfloat16: time, memory, compile time, and the planner's predictions.

There are three comparisons. At world size 1 plain ``torch.compile`` shows the overhead of sharding, which gains nothing
there. As one of 8 ranks in a fake process group, the step has the buckets and copies of 8 ranks, and collectives that
take no time: its memory and its compute are compared with their predictions. On several GPUs FSDP2, and compiled_fsdp
without overlap, show the gain by overlap. Each run has its own process group, and rounds of the systems are
interleaved.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.gpu.model import LARGE, SMALL, Shape, by_layer, stack, tokens_of
from bench.gpu.record import Record, not_measured
from bench.gpu.timing import once, synchronize

PLAIN, OURS = "torch.compile", "compiled_fsdp"
KEPT, SERIAL = "compiled_fsdp, collectives kept", "compiled_fsdp, no overlap"
FSDP2 = "FSDP2, compiled per layer"
ALONE = (PLAIN, OURS, KEPT, FSDP2)
AMONG = (OURS, FSDP2)
TOGETHER = (OURS, SERIAL, FSDP2)
PRETENDED = 8
_MARK = "RESULT "


class Failed(RuntimeError):
    """A system's run failed; the message has its whole output."""


def measure(device: torch.device, *, quick: bool, rounds: int) -> Iterator[Record]:
    """Yield records at world size 1, as one of 8 ranks, and over all GPUs (as a dry run: two processes on the CPU)."""
    yield from _compared("step, world size 1", ALONE, 1, device, quick=quick, rounds=rounds)
    yield from _compared(
        f"step, one of {PRETENDED} ranks", AMONG, 1, device, quick=quick, rounds=rounds, pretended=PRETENDED
    )
    gpus = torch.cuda.device_count() if device.type == "cuda" else 2
    if gpus < 2:
        yield not_measured("step, all GPUs", "one GPU: no NCCL overlap")
    else:
        yield from _compared("step, all GPUs", TOGETHER, gpus, device, quick=quick, rounds=rounds)


def _compared(
    bench: str,
    systems: tuple[str, ...],
    world: int,
    device: torch.device,
    *,
    quick: bool,
    rounds: int,
    pretended: int | None = None,
) -> Iterator[Record]:
    runs: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as caches:
        for _ in range(rounds):  # the first round compiles, later rounds find the code in the cache
            for number, system in enumerate(systems):
                cache = Path(caches) / str(number)  # a number, because compilers reject paths with spaces
                if system not in failed:
                    try:
                        runs[system].append(_run(system, world, device, quick=quick, cache=cache, pretended=pretended))
                    except Failed as error:  # for example out of memory: we still measure the other systems
                        failed[system] = str(error)
    for system, why in failed.items():
        yield not_measured(f"{bench}: {system}", why)
    for system, found in runs.items():
        if system in failed:
            continue
        first = found[0]
        medians = {key: statistics.median(run[key] for run in found) for key in ("seconds", "with_optimizer_seconds")}
        more = {key: value for key, value in first.items() if key not in ("seconds", "parameters")} | {
            "with_optimizer_seconds": medians["with_optimizer_seconds"],
            "rounds_seconds": [run["seconds"] for run in found],
        }
        yield Record(bench, system, tensors=first["parameters"], seconds=medians["seconds"], more=more)


def _run(
    system: str, world: int, device: torch.device, *, quick: bool, cache: Path, pretended: int | None
) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command += ["-m", "bench.gpu.step", system, device.type, *(["--quick"] if quick else [])]
    command += [] if pretended is None else ["--pretended", str(pretended)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not lines:
        raise Failed(f"failed at world size {world}:\n{done.stdout}\n{done.stderr}")
    return json.loads(lines[-1].removeprefix(_MARK))


# ---- in a process of its own -----------------------------------------------------------------------------------------
@dataclass
class _Step:
    """A model, and how to run a step of it."""

    model: nn.Module
    run: Callable[[Tensor], Tensor]
    tokens: Tensor
    optimizer: torch.optim.Optimizer

    def backward(self) -> None:
        self.run(self.tokens).backward()
        self.optimizer.zero_grad()

    def whole(self) -> None:
        self.run(self.tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _step(system: str, shape: Shape, device: torch.device) -> _Step:
    from torch.distributed.fsdp import fully_shard as fsdp2

    from compiled_fsdp import fully_shard

    model = stack(shape, device, torch.bfloat16)
    run: Any
    if system == PLAIN:
        run = torch.compile(model)
    elif system == FSDP2:
        run = by_layer(model, fsdp2)
        for layer in model.layers:
            layer.compile()
    else:
        by_layer(model, fully_shard)
        # 4 bytes per element: AdamW's two moments, in bfloat16 like the parameters
        options = {
            "collectives_at_world_size_1": system == KEPT,
            "overlap": system != SERIAL,
            "optimizer_bytes_per_element": 4,
        }
        run = torch.compile(model, backend="compiled_fsdp", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    return _Step(model, run, tokens_of(shape, device), optimizer)


def _work(system: str, device: torch.device, *, quick: bool) -> dict[str, Any]:
    shape, repeats = (SMALL, 3) if quick else (LARGE, 10)
    step = _step(system, shape, device)
    begin = time.perf_counter()
    step.whole()
    synchronize(device)
    first = time.perf_counter() - begin
    step.whole()  # with the optimizer state that the first step made
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    whole = [once(step.whole, device) for _ in range(repeats)]
    result: dict[str, Any] = {
        "seconds": statistics.median(once(step.backward, device) for _ in range(repeats)),
        "with_optimizer_seconds": statistics.median(whole),
        "compile_seconds": first - statistics.median(whole),
        "parameters": sum(1 for _ in step.model.parameters()),
        "elements": shape.parameters,
        "memory_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else "not measured on the CPU",
        "host_synchronizations": _synchronizations(step) if device.type == "cuda" else "not measured on the CPU",
    }
    if system in (OURS, KEPT, SERIAL):
        result |= _predicted(step.model)
    return result


def _predicted(model: nn.Module) -> dict[str, Any]:
    from compiled_fsdp import explain

    found = [graph.simulation for graph in explain(model).graphs if graph.simulation is not None]
    if not found:
        return {"predicted": "nothing to plan: no collective"}
    return {
        "predicted_seconds": sum(s.seconds for s in found),
        "predicted_exposed_seconds": sum(s.exposed for s in found),
        "predicted_memory_bytes": max(s.peak for s in found),
    }


def _synchronizations(step: _Step) -> int:
    """Count how often the host waits for the device in a step, by torch's own warnings."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step.whole()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def main() -> None:
    """Run one rank of one run; rank 0 prints the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=sorted({*ALONE, *TOGETHER}))
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--pretended", type=int, help="be one of so many ranks, of which there are no others")
    options = parser.parse_args()
    device = torch.device(options.device, int(os.environ["LOCAL_RANK"]) if options.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if options.pretended is None:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.pretended)
    try:
        result = _work(options.system, device, quick=options.quick)
        if dist.get_rank() == 0:
            print(_MARK + json.dumps(result), flush=True)
        dist.barrier()  # gloo's thread may otherwise abort the interpreter at exit
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
