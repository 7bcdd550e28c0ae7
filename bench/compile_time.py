"""Measure compile time by stage, beside torch's own backend on the same model without sharding.

    python -m bench.compile_time [--layers 8 32] [--repeats 3] [--cold] [--json FILE]

Each run times the first forward and backward of the Llama in `examples/llama.py` (width 64) in a group of two fake
ranks, and subtracts the time of a later step. The systems are compiled_fsdp, compiled_fsdp with each layer a nested
region, and Inductor on the unsharded model. They take turns, each run has its own process, and medians are printed.
A first run, which does not count, fills Inductor's cache of kernels (with ``--cold`` nothing is cached). AOTAutograd's
cache is off: `bench/warm_start.py` measures how much it saves.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

SYSTEMS = ("compiled_fsdp", "compiled_fsdp, nested regions", "inductor, unsharded")
STAGES = {
    "Dynamo": ("bytecode_tracing",),
    "guards": ("build_guards",),
    "AOTAutograd traces": ("aot_collect_metadata", "aot_trace_joint_graph"),
}
"""Stages that torch times itself, with the names of torch's metrics for each."""


def measure(system: str, layers: int) -> dict[str, float]:
    """Return the seconds by which the first step is longer than a later one, in all and by stage."""
    import torch
    import torch._inductor.compile_fx  # for all systems: torch.compile imports it early only for its own backend
    import torch.distributed as dist
    from torch._dynamo.utils import compilation_time_metrics
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    from llama import Llama

    from compiled_fsdp import fully_shard
    from compiled_fsdp.passes.pipeline import run_passes

    torch._functorch.config.enable_autograd_cache = False
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch.set_num_threads(1)
    model = Llama(dim=64, layers=layers, seq_len=64)
    if "nested" in system:
        layer = type(model.layers[0])
        layer.forward = torch.compiler.nested_compile_region(layer.forward)
    if "unsharded" not in system:
        for unit in (*model.layers, model):
            fully_shard(unit)
    run = torch.compile(model, backend=system.split(",")[0])
    tokens, ours, steps = torch.zeros(2, 64, dtype=torch.int64), [0.0], []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                ours[0] += time.perf_counter() - start

        return call

    with mock.patch("compiled_fsdp.compiler.compilation.run_passes", timed(run_passes)):
        for _ in range(4):
            start = time.perf_counter()
            run(tokens).sum().backward()
            steps.append(time.perf_counter() - start)
    seconds = {"all": steps[0] - median(steps[1:])}
    for stage, names in STAGES.items():
        seconds[stage] = sum(sum(compilation_time_metrics.get(name, ())) for name in names)
    seconds["our passes"] = ours[0]
    return seconds | {"cut, Inductor, the rest": 2 * seconds["all"] - sum(seconds.values())}


def main() -> None:
    """Measure each system in its own processes, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each system (%(default)s)")
    parser.add_argument("--cold", action="store_true", help="without any cache")
    parser.add_argument("--json", type=Path, help="write all runs to this file")
    parser.add_argument("--work", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(measure(options.work, options.layers[0])))
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if options.cold:
        environment["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    found: dict[str, list[dict[str, float]]] = {}
    for layers in options.layers:
        for repeat in range(options.repeats + (not options.cold)):
            for system in SYSTEMS:
                command = [sys.executable, "-m", "bench.compile_time", "--work", system, "--layers", str(layers)]
                text = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
                if options.cold or repeat:  # the first run fills the cache
                    found.setdefault(f"{layers} layers, {system}", []).append(json.loads(text.splitlines()[-1]))
    for name, runs in found.items():
        stages = ", ".join(f"{stage} {median(run[stage] for run in runs):.1f}" for stage in runs[0] if stage != "all")
        every = sorted(run["all"] for run in runs)
        print(f"{name}: {median(every):.1f} s ({every[0]:.1f} to {every[-1]:.1f}): {stages}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
