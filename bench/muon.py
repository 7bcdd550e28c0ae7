"""Measure a step of Muon on sharded matrices over a real, slow network: three ways to compute with whole matrices.

    python -m bench.muon [--gbit 1] [--layers 8] [--width 384] [--rounds 5] [--ranks 2,4] [--json FILE]

Needs root, ip and tc, like ``bench.real_link``: ranks run in two network namespaces with a link of limited rate between
them, two ranks in each if there are four. The matrices are those of an MLP: in each layer one of [4 * width, width] and
one of [width, 4 * width], float32, sharded on the first dimension, with random gradients. The ways:

- "owners": ``compiled_fsdp.Muon``. Each matrix goes to one rank, and its result comes back.
- "gathered": each rank gathers every gradient, and computes every matrix.
- "dtensor": ``torch.optim.Muon`` with DTensors, whose matrix products communicate.

Each round has one step of each way in turn, from a barrier to a barrier. Bytes are those that the network card and the
loopback device of rank 0's machine sent, for each of its ranks. Peak memory is counted from the allocator's events,
beyond weights, gradients and momentum.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from bench import link
from bench.medians import median_and_interval
from bench.memory import traced
from bench.tables import table
from compiled_fsdp import Muon
from compiled_fsdp.compat.optim import adjusted_lr, newton_schulz

ROOT = Path(__file__).parent.parent


class Gathered(torch.optim.Muon):
    """Muon with one gather for each gradient; each rank computes all matrices."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                momentum = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
                momentum.lerp_(param.grad, 1 - group["momentum"])
                whole = param.grad.lerp(momentum, group["momentum"]).full_tensor()
                update = newton_schulz(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
                local = param.to_local()
                rows = local.shape[0]
                local.mul_(1 - group["lr"] * group["weight_decay"])
                local.add_(update[dist.get_rank() * rows :][:rows], alpha=-adjusted_lr(group["lr"], None, param.shape))


WAYS: dict[str, Any] = {"owners": Muon, "gathered": Gathered, "dtensor": torch.optim.Muon}


def matrices(options: argparse.Namespace, mesh: DeviceMesh) -> list[nn.Parameter]:
    """Make the parameters, the same on all ranks and in each call, with gradients."""
    generator, found = torch.Generator().manual_seed(0), []
    for size in ((4 * options.width, options.width), (options.width, 4 * options.width)) * options.layers:
        weight, grad = (torch.randn(size, generator=generator) for _ in range(2))
        param = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
        param.grad = distribute_tensor(grad, mesh, [Shard(0)])
        found.append(param)
    return found


def worker(options: argparse.Namespace) -> None:
    """Run one rank, in its network namespace."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    records: dict[str, Any] = {name: {"step_s": [], "sent_bytes": []} for name in WAYS}
    optimizers, results = {}, {}
    for name, kind in WAYS.items():
        params = matrices(options, mesh)
        optimizers[name] = kind(params)
        optimizers[name].step()  # makes the momentum
        _, _, records[name]["peak_bytes"] = traced(optimizers[name].step)
        results[name] = torch.cat([_local(param).flatten() for param in params])
    for name in WAYS:  # bfloat16 products of another order differ a little
        records[name]["differs"] = float((results[name] - results["gathered"]).abs().max())
    for _ in range(options.rounds):
        for name, optimizer in optimizers.items():
            dist.barrier()
            before, start = link.sent_bytes() + link.sent_bytes("lo"), time.perf_counter()
            optimizer.step()
            dist.barrier()
            records[name]["step_s"].append(time.perf_counter() - start)
            sent = link.sent_bytes() + link.sent_bytes("lo") - before
            records[name]["sent_bytes"].append(sent // int(os.environ["LOCAL_WORLD_SIZE"]))
    options.out.write_text(json.dumps(records))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort a process whose interpreter shuts down


def _local(param: nn.Parameter) -> torch.Tensor:
    return param.to_local().detach() if isinstance(param, DTensor) else param.detach()


def measure(options: argparse.Namespace, ranks: int, folder: Path) -> dict[str, Any]:
    """Run all ranks; return rank 0's records by way."""
    port, workers = random.randrange(20000, 30000), []
    with link.Link(f"{options.gbit}gbit", "4mb", ranks // 2) as network:
        for rank in range(ranks):
            command = [sys.executable, "-m", "bench.muon", "--out", str(folder / f"{rank}.json")]
            for name in ("gbit", "layers", "width", "rounds"):
                command += [f"--{name}", str(getattr(options, name))]
            environment = {
                **os.environ, **network.environment(rank, port), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
            }  # fmt: skip
            workers.append(subprocess.Popen(network.command(rank, command), env=environment, cwd=ROOT))
        codes = [each.wait() for each in workers]
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}")
    records: dict[str, Any] = json.loads((folder / "0.json").read_text())
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, 2 or 4")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out is not None:
        worker(options)
        return
    if reason := link.why_not():
        raise SystemExit(f"This machine cannot make a link: {reason}.")
    found, lines = {}, []
    for ranks in map(int, options.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            found[str(ranks)] = measure(options, ranks, Path(folder))
        for way, record in found[str(ranks)].items():
            seconds, (low, high) = median_and_interval(record["step_s"])
            sent, _ = median_and_interval(record["sent_bytes"])
            spread = f"{seconds:.2f} ({low:.2f} .. {high:.2f})"
            lines.append((str(ranks), way, spread, f"{sent / 1e6:.0f}", f"{record['peak_bytes'] / 1e6:.0f}"))
    print(table(("ranks", "way", "step, s", "sent by each rank, MB", "peak, MB"), lines))
    if options.json is not None:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
