"""Plan steps under memory budgets, beside checkpoints by hand and torch's own activation_memory_budget.

    python -m bench.budgets [--model llama3-8b] [--world-size 8] [--seq 8192] [--layers N] [--json FILE]
    python -m bench.budgets --checkpointing selective --shares 0.9,0.8   # shares of the memory without a budget

Nothing runs on a device, because every figure is a prediction of the cost model. The rows: without a budget; full and
selective checkpoints, and torch's setting; then the plans within the memory of each of these, and the least budget,
with copies of activations to host memory and without.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench.tables import table
from compiled_fsdp.passes.cost import PROFILES
from compiled_fsdp.passes.plan.search import OverBudget
from compiled_fsdp.tools.cli.budgets import TOO_LITTLE
from compiled_fsdp.tools.cli.estimate import Estimate, estimate, estimates
from compiled_fsdp.tools.cli.setting import Setting
from compiled_fsdp.tools.cli.shapes import CHECKPOINTING, SHAPES

SHARES = (0.7, 0.4)
"""Values of torch's activation_memory_budget."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama3-8b", choices=list(SHAPES))
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=0, help="instead of all of the model's")
    parser.add_argument("--hardware", default="h100", choices=list(PROFILES))
    parser.add_argument("--checkpointing", default="none", choices=CHECKPOINTING, help="with --shares")
    parser.add_argument("--shares", help="plan only within these shares of the memory without a budget")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.model]
    shape = replace(shape, layers=arguments.layers or shape.layers)
    hardware = PROFILES[arguments.hardware]
    setting = Setting(
        shape, "", arguments.world_size, 1, 1, hardware, 1, arguments.seq, "bf16", True, arguments.checkpointing, None
    )
    found = []
    chosen = rows(setting)
    if arguments.shares:
        chosen = within_shares(setting, [float(share) for share in arguments.shares.split(",")])
    for name, one in chosen:
        found.append((name, one))
        print(f"{name}: {_figures(one)}", flush=True)
    what = f"{arguments.model}, {shape.layers} layers, {setting.world_size} ranks, {setting.sequence:,} tokens"
    print(
        table(
            (what, "peak, GB", "step, ms"),
            [(name, f"{one.peak_bytes / 1e9:.1f}", f"{1e3 * one.step_s:,.1f}") for name, one in found],
        )
    )
    if arguments.json is not None:
        text = [{"row": name, "peak_bytes": one.peak_bytes, "step_s": one.step_s} for name, one in found]
        arguments.json.write_text(json.dumps(text))


def rows(setting: Setting) -> Iterator[tuple[str, Estimate]]:
    """Yield the rows of the table, each with its name."""
    yield "no budget", estimate(setting)
    others = {
        "full checkpoints": functools.partial(estimate, replace(setting, checkpointing="full")),
        "selective checkpoints": functools.partial(estimate, replace(setting, checkpointing="selective")),
        **{f"activation_memory_budget={share}": functools.partial(_by_torch, setting, share) for share in SHARES},
    }
    peaks: dict[str, float] = {}
    for name, plan in others.items():
        other = plan()
        peaks[f"the memory of {name}"] = other.peak_bytes
        yield name, other
    yield from _within(setting, peaks | {"least": TOO_LITTLE})


def within_shares(setting: Setting, shares: Sequence[float]) -> Iterator[tuple[str, Estimate]]:
    """Yield the plan without a budget, and those within shares of its memory."""
    free = estimate(setting)
    yield "no budget", free
    yield from _within(setting, {f"{share:.1%} of the memory": share * free.peak_bytes for share in shares})


def _within(setting: Setting, budgets: Mapping[str, float]) -> Iterator[tuple[str, Estimate]]:
    """Yield the plans within budgets, with copies and without; if nothing fits, within the least budget."""
    for copies, choice in (("", "auto"), (", no copies", False)):
        one = replace(setting, options=(("offload_activations", choice),))
        for name, plan in zip(budgets, estimates(one, list(budgets.values())), strict=True):
            if isinstance(plan, OverBudget):
                yield f"least{copies}", estimate(replace(one, budget=float(plan.least)))
            else:
                yield f"{name}{copies}", plan


def _by_torch(setting: Setting, share: float) -> Estimate:
    with torch._functorch.config.patch(activation_memory_budget=share):
        return estimate(setting)


def _figures(one: Estimate) -> str:
    return f"{one.peak_bytes / 1e9:.2f} GB, {1e3 * one.step_s:.1f} ms, {one.for_backward or ''}"


if __name__ == "__main__":
    main()
