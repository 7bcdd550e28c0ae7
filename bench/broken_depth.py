"""Measure how compile time grows with depth if the graph breaks after every layer. Equal layers share their graphs.

    python -m bench.broken_depth [--repeats N]

Each run times the first forward and backward of real_link's MLP with 4 or 24 layers, in a group of two fake ranks, with
Inductor and without its caches, and subtracts the time of a later step. Each run has its own process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from statistics import median

DEPTHS = (4, 24)


def measure(layers: int) -> dict[str, float]:
    """Return the seconds by which the first step is longer than a later one, and the number of compiled graphs."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from bench.link_models import MLP
    from compiled_fsdp import explain, fully_shard

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch.set_num_threads(1)
    model = fully_shard(MLP("after", 256, layers))
    run = torch.compile(model, backend="compiled_fsdp")
    x = torch.randn(64, 256)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        run(x).square().mean().backward()
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds[0] - median(seconds[1:]), "graphs": len(explain(model).graphs)}


def main() -> None:
    """Measure each depth in its own processes, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each depth (%(default)s)")
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.layers:
        print(json.dumps(measure(options.layers)))
        return
    environment = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "OMP_NUM_THREADS": "1"}
    results: dict[int, list[dict[str, float]]] = {depth: [] for depth in DEPTHS}
    for _ in range(options.repeats):
        for depth in DEPTHS:
            command = [sys.executable, "-m", "bench.broken_depth", "--layers", str(depth)]
            text = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            results[depth].append(json.loads(text.splitlines()[-1]))
    for depth, runs in results.items():
        seconds = sorted(run["seconds"] for run in runs)
        interval = f"({seconds[0]:.2f} .. {seconds[-1]:.2f})"
        print(f"{depth} layers: {runs[0]['graphs']:.0f} graphs, {median(seconds):.2f} s {interval}")
    few, many = (results[depth] for depth in DEPTHS)
    ratios = sorted(b["seconds"] / a["seconds"] for a, b in zip(few, many, strict=True))
    print(f"ratio {median(ratios):.2f} ({ratios[0]:.2f} .. {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
