"""Host time of a step: what Python, guards and autograd cost when compute is nothing.

    python bench/host_time.py [--layers 24] [--runs 30]

One process, CPU, a group of one rank, layers of width 8. Milliseconds for forward and backward, medians of interleaved
runs. No collective runs in any of them but FSDP2's, which copies at a group of one.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as fsdp2

from compiled_fsdp import fully_shard


class Layer(nn.Module):
    """[batch, 8] to [batch, 8], 8 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b, self.c = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.c(self.b(self.a(self.norm(x)).relu()).relu())


def model_of(
    layers: int, shard: Callable[..., object] | None, backend: str | None, per_layer: bool = False
) -> nn.Module:
    """A stack of layers, sharded by ``shard`` (layer by layer and the root) and compiled."""
    model = nn.Sequential(*(Layer() for _ in range(layers)))
    for module in (*model, model) if shard else ():
        shard(module)
    if backend is None:
        return model
    options = {"codegen": "aot_eager"} if backend == "compiled_fsdp" else None
    if per_layer:
        for layer in model:
            layer.compile(backend=backend)
        return model
    return torch.compile(model, backend=backend, options=options)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--runs", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        systems = {
            "unsharded, aot_eager": model_of(options.layers, None, "aot_eager"),
            "compiled_fsdp, aot_eager": model_of(options.layers, fully_shard, "compiled_fsdp"),
            "FSDP2, eager": model_of(options.layers, fsdp2, None),
            "FSDP2, aot_eager per layer": model_of(options.layers, fsdp2, "aot_eager", per_layer=True),
        }
        times: dict[str, list[float]] = {name: [] for name in systems}
        x = torch.randn(2, 8)
        for run in range(options.runs + 3):
            for name, model in systems.items():
                start = time.perf_counter()
                model(x).sum().backward()
                if run >= 3:  # the first ones compile
                    times[name].append(1000 * (time.perf_counter() - start))
        print(
            f"milliseconds a step, {8 * options.layers} parameters, torch {torch.__version__}, {options.runs} interleaved runs"
        )
        for name, values in times.items():
            low, median, high = statistics.quantiles(values, n=4)
            print(f"{name:28} median {median:7.2f}   quartiles {low:.2f} .. {high:.2f}")
        dist.barrier()  # gloo's thread may otherwise abort the interpreter at exit
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
