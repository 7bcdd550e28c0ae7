"""Measure the cost of ``torch.compiler.set_enable_guard_collectives`` for a training step.

    python -m bench.guard_collectives [--ranks N] [--steps N]

With that switch the ranks tell each other, at every entry of compiled code, whether their guards hold. The model is
real_link's MLP with 8 layers of width 64, in gloo processes on this machine, with ``codegen="aot_eager"``: as one
graph, and with a graph break after every layer. Steps with the exchange and without it take turns, and a difference is
between two consecutive steps. The program prints medians and their 95 % intervals.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from bench.medians import median_and_interval


def _measure(rank: int, ranks: int, steps: int, store: str) -> None:
    from bench.link_models import MLP
    from compiled_fsdp import explain, fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for name, broken in (("one graph", ""), ("a break after every layer", "after")):
        model = fully_shard(MLP(broken, 64))
        run = torch.compile(model, backend="compiled_fsdp", options={"codegen": "aot_eager"})
        x = torch.randn(32, 64)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for step in range(2 * steps + 6):
            exchanges = step % 2 == 1
            torch.compiler.set_enable_guard_collectives(exchanges)
            dist.barrier()
            start = time.perf_counter()
            run(x).square().mean().backward()
            if step >= 6:
                seconds[exchanges].append(time.perf_counter() - start)
        torch.compiler.set_enable_guard_collectives(False)
        if rank == 0:
            graphs = sum(graph.phase == "forward" for graph in explain(model).graphs)
            without = statistics.median(seconds[False])
            more, (low, high) = median_and_interval([b - a for a, b in zip(seconds[False], seconds[True], strict=True)])
            print(
                f"{name}, {ranks} ranks, {graphs} graphs in forward: {1e3 * without:.2f} ms; "
                f"with the exchange {1e3 * more:+.2f} ms ({1e3 * low:+.2f} .. {1e3 * high:+.2f})",
                flush=True,
            )
    dist.destroy_process_group()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes (%(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="of each kind (%(default)s)")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        arguments = options.ranks, options.steps, str(Path(folder) / "store")
        spawn(_measure, arguments, nprocs=options.ranks)


if __name__ == "__main__":
    main()
