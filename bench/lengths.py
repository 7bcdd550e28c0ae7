"""Measure what changing sequence lengths cost: compiles, and plans that were made for another length.

    python -m bench.lengths [--layers 8] [--lengths 16,24,32,40,48,56,64,72] [--no-plans]

First the Llama of `examples/llama.py` (width 64, two fake ranks) makes a step with each length in turn, with torch's
default (the second length makes the size symbolic), with ``dynamic=True`` and with ``dynamic=False``; and so does the
unsharded model with Inductor. The seconds are those of all first steps, less one later step for each. Kernels that were
compiled before are in Inductor's cache; AOTAutograd's cache is off. Then a Llama 3 8B of so many layers is planned for
8 H100s and eight lengths from 1,024 to 8,192, and each plan is simulated at each other length.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from bench.tables import table

SYSTEMS = ("compiled_fsdp", "inductor, unsharded")
DYNAMIC = {"default": None, "dynamic=True": True, "dynamic=False": False}


def measure(system: str, dynamic: str, layers: int, lengths: list[int]) -> dict[str, float]:
    """Return the number of compiled graphs, and the seconds that compiling took."""
    import torch
    import torch._inductor.compile_fx  # for both systems: torch.compile imports it early only for its own backend
    import torch.distributed as dist
    from torch._dynamo.utils import counters
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    from llama import Llama

    from compiled_fsdp import fully_shard

    torch._functorch.config.enable_autograd_cache = False
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch.set_num_threads(1)
    model = Llama(dim=64, layers=layers, seq_len=max(lengths))
    if "unsharded" not in system:
        for unit in (*model.layers, model):
            fully_shard(unit)
    run = torch.compile(model, backend=system.split(",")[0], dynamic=DYNAMIC[dynamic])
    first, later = 0.0, 0.0
    for length in lengths:
        for repeat in range(3):
            start = time.perf_counter()
            run(torch.zeros(2, length, dtype=torch.int64)).sum().backward()
            seconds = time.perf_counter() - start
            first, later = first + seconds * (repeat == 0), later + seconds * (repeat == 2)
    return {"graphs": counters["stats"]["unique_graphs"], "seconds": first - later}


def plans(layers: int) -> str:
    """Return a table: each plan at each length, as a share of the step that the plan for that length takes."""
    import torch

    from bench.capture import fake_group
    from compiled_fsdp import fully_shard
    from compiled_fsdp.compiler.preview import planned_graphs
    from compiled_fsdp.passes.plan.simulate import simulate
    from compiled_fsdp.tools.cli.shapes import SHAPES, Decoder

    lengths = range(1024, 8193, 1024)
    found = []
    for length in lengths:
        with fake_group(8), torch.device("meta"):
            model = Decoder(replace(SHAPES["llama3-8b"], layers=layers), "none").to(torch.bfloat16)
            for unit in (*model.layers, model):
                fully_shard(unit)
            tokens = torch.zeros(1, length, dtype=torch.int64)
            found.append(planned_graphs(model, (tokens, tokens.clone()), options={"hardware": "h100"})[0])
    rows: list[list[str]] = []
    for made_for, planned in zip(lengths, found, strict=True):
        row = [f"{made_for:,}"]
        for own in found:
            other = best = 0.0
            for plan, of in zip(planned, own, strict=True):
                other += simulate(of.tasks, tuple(timing.launch for timing in plan.simulation.timings)).seconds
                best += of.simulation.seconds
            row.append(f"{other / best:.3f}")
        rows.append(row)
    return table(("planned for", *(f"at {length:,}" for length in lengths)), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--lengths", default="16,24,32,40,48,56,64,72")
    parser.add_argument("--no-plans", action="store_true", help="measure compiles alone")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    if options.work:
        system, dynamic = options.work
        print(json.dumps(measure(system, dynamic, options.layers, lengths)))
        return
    rows = []
    for dynamic in DYNAMIC:
        for system in SYSTEMS:
            command = [sys.executable, "-m", "bench.lengths", "--work", system, dynamic]
            command += ["--layers", str(options.layers), "--lengths", options.lengths]
            for _ in range(2):  # the first run fills the cache
                text = subprocess.run(
                    command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.PIPE, text=True
                ).stdout
            one = json.loads(text.splitlines()[-1])
            rows.append((dynamic, system, f"{one['graphs']:.0f}", f"{one['seconds']:.1f}"))
            print(*rows[-1], flush=True)
    print(table(("", "system", "graphs", "compiling, s"), rows))
    if not options.no_plans:
        print(plans(options.layers))


if __name__ == "__main__":
    main()
