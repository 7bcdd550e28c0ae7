"""Measure how much compile time the caches on disk save when a program runs for the second time.

    python bench/warm_start.py [--runs 5] [--ranks 2] [--layers 4] [--dim 256]

Each run starts two programs, one after the other, with a new cache directory for both: the first program compiles, the
second finds all graphs. Each program shards the Llama of `examples/llama.py` in `--ranks` processes (CPU, gloo). Rank 0
times the first forward and backward, compile included, and subtracts the average of the later steps. The same is done
for the unsharded model under torch's "inductor" backend. A third program of compiled_fsdp has an empty cache directory,
and loads a file of `compiled-fsdp precompile`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SYSTEMS = ("compiled_fsdp", "inductor, unsharded")
STEPS = 3


def work(system: str, layers: int, dim: int, load: str | None) -> None:
    """Run one rank of one program, which may load precompiled code. Rank 0 prints a line of JSON."""
    import torch
    import torch._inductor.compile_fx  # for all systems: torch.compile imports it early only for its own backend
    import torch.distributed as dist
    from torch._dynamo.utils import counters

    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    from llama import Llama

    from compiled_fsdp import fully_shard, load_precompiled

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = Llama(dim=dim, layers=layers, seq_len=128)
    if system == "compiled_fsdp":
        fully_shard(model)
    compiled = torch.compile(model, backend=system.split(",")[0])
    tokens = torch.randint(256, (4, 128))
    start = time.perf_counter()
    if load and not load_precompiled(load):
        raise SystemExit(f"{load} was not loaded")
    loading = time.perf_counter() - start
    dist.barrier()
    times = []
    for _ in range(1 + STEPS):
        start = time.perf_counter()
        compiled(tokens).sum().backward()
        times.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        hits, misses = (counters["inductor"][f"fxgraph_cache_{what}"] for what in ("hit", "miss"))
        hits += counters["aot_autograd"]["autograd_cache_hit"]
        print(
            json.dumps(
                {"seconds": times[0] - statistics.mean(times[1:]), "hits": hits, "misses": misses, "loading": loading}
            )
        )
    dist.barrier()  # gloo's thread may otherwise abort the interpreter at exit
    dist.destroy_process_group()


def arguments(system: str, options: argparse.Namespace) -> list[str]:
    """Return the arguments with which this file is a program to measure."""
    return ["--work", system, "--layers", str(options.layers), "--dim", str(options.dim)]


def precompile(options: argparse.Namespace, file: str) -> None:
    """Write the code of compiled_fsdp's program to a file."""
    command = [sys.executable, "-m", "compiled_fsdp", "precompile", "--script", __file__, "--out", file]
    command += ["--world-size", str(options.ranks), "--", *arguments("compiled_fsdp", options)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})


def program(system: str, options: argparse.Namespace, cache: str, *load: str) -> dict[str, float]:
    """Run one program in fresh processes; return its rank 0's measurements."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    command += [__file__, *arguments(system, options), *load]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return json.loads(out.splitlines()[-1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--work", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.layers, options.dim, options.load)
        return
    found: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = {system: [] for system in SYSTEMS}
    loaded = []
    with tempfile.TemporaryDirectory() as folder:
        precompile(options, file := f"{folder}/precompiled")
        for _ in range(options.runs):
            for system, pairs in found.items():
                with tempfile.TemporaryDirectory() as cache:
                    pairs.append((program(system, options, cache), program(system, options, cache)))
            with tempfile.TemporaryDirectory() as cache:
                loaded.append(program(SYSTEMS[0], options, cache, "--load", file))
    print(
        f"compile seconds of {options.layers} layers of width {options.dim}, {options.ranks} ranks; "
        f"{options.runs} runs in turn"
    )
    for system, pairs in found.items():
        if not pairs[-1][1]["hits"]:
            raise SystemExit(f"{system}: the second program found nothing in the cache of the first")
        cold, warm = ([one["seconds"] for one in part] for part in zip(*pairs, strict=True))
        ratios = [w / c for c, w in zip(cold, warm, strict=True)]
        print(
            f"{system:20} cold {statistics.median(cold):6.2f}   warm {statistics.median(warm):6.2f}   "
            f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})   "
            f"warm: {pairs[-1][1]['hits']:.0f} hits, {pairs[-1][1]['misses']:.0f} misses"
        )
    seconds, loading = ([one[name] for one in loaded] for name in ("seconds", "loading"))
    ratios = [one / pair[1]["seconds"] for one, pair in zip(seconds, found[SYSTEMS[1]], strict=True)]
    print(
        f"{SYSTEMS[0]}, precompiled: {statistics.median(seconds):.2f}, after {statistics.median(loading):.2f} of "
        "loading; "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f}) of {SYSTEMS[1]}, warm; "
        f"{loaded[-1]['hits']:.0f} hits, {loaded[-1]['misses']:.0f} misses"
    )


if __name__ == "__main__":
    main()
