"""Measure how long planning takes.

    python -m bench.plan_time [--layers 8 32 126] [--model]

The graphs are training graphs of layers like Llama 405B's, captured with a fake process group. The program prints the
seconds of all passes on forward and backward. With ``--model`` it also prints the time that compiled_fsdp's passes add
to the first step of the README's model.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from bench.capture import SHAPES, capture, fake_group
from compiled_fsdp import fully_shard
from compiled_fsdp.compat.graphs import copy_of
from compiled_fsdp.passes.pipeline import GRAPH_PASSES, run_passes, through
from compiled_fsdp.passes.plan.choose import PlanRules

SHAPE = next(shape for shape in SHAPES if shape.name == "llama3-405b")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="*", default=[8, 32, 126])
    parser.add_argument("--world-size", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--model", action="store_true", help="the README's model, compiled by Inductor")
    arguments = parser.parse_args()
    if arguments.model:
        readme_model()
    for layers in arguments.layers:
        with fake_group(arguments.world_size):
            layered(layers, arguments.world_size, arguments.tokens)


def layered(layers: int, world_size: int, tokens: int) -> None:
    start = time.perf_counter()
    captured = capture(replace(SHAPE, layers=layers), world_size, tokens)
    capturing = time.perf_counter() - start
    seconds, nodes = [], 0
    for phase in ("forward", "backward"):
        gm = copy_of(getattr(captured, phase))
        nodes += len(gm.graph.nodes)
        ctx = captured.context(phase, PlanRules())
        start = time.perf_counter()
        run_passes(through("plan"), gm, ctx)
        planned = time.perf_counter()
        run_passes(GRAPH_PASSES[len(through("plan")) :], gm, ctx)
        seconds += [planned - start, time.perf_counter() - planned]
    print(
        f"{layers:4} layers, {nodes:6} nodes: planned in {seconds[0] + seconds[2]:6.2f} s (forward {seconds[0]:.2f}, "
        f"backward {seconds[2]:.2f}), rewritten in {seconds[1] + seconds[3]:.2f} s; captured in {capturing:.0f} s",
        flush=True,
    )


def readme_model() -> None:
    """Print the share of compiled_fsdp's passes in the first step of `examples/llama.py`'s model, without caches."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    from llama import Llama

    spent = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[0] += time.perf_counter() - start

        return run

    ours = mock.patch("compiled_fsdp.compiler.compilation.run_passes", timed(run_passes))
    with ours, fake_group(2), torch._inductor.config.patch(force_disable_caches=True):
        model = Llama(dim=256, layers=4, seq_len=128)
        for unit in (*model.layers, model):
            fully_shard(unit)
        tokens = torch.zeros(4, 128, dtype=torch.int64)
        start = time.perf_counter()
        logits = torch.compile(model, backend="compiled_fsdp")(tokens)
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        total = time.perf_counter() - start
    print(
        f"README's model: first step {total:.1f} s, of it our passes {spent[0]:.2f} s: "
        f"{spent[0] / (total - spent[0]):.1%} of the rest"
    )


if __name__ == "__main__":
    main()
