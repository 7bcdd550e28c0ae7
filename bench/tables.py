"""Markdown tables for docs/benchmarks.md, made from the records that measurements write."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from bench.link_cases import LAYOUTS

Record = Mapping[str, Any]
SYSTEMS = {
    "compiled_fsdp": "**compiled_fsdp**",
    "fsdp2": "FSDP2, eager",
    "fsdp2_compiled": "FSDP2, compiled per block",
    "functional": "functional collectives, Inductor",
    "functional_overlap": "functional collectives with torch's overlap passes",
    "ddp": "DDP (not sharded)",
    "broken": "**broken after every layer**",
    "broken_inside": "**broken inside of every layer**",
    "broken_autograd": "**broken after every layer, compiled autograd**",
    "blocks": "**each layer compiled alone**",
    "floor_wire": "our collectives alone",
    "floor_wire_fsdp2": "FSDP2's collectives alone",
    "floor_compute": "compute alone",
    "fsdp2_bf16": "FSDP2, mixed precision in bfloat16",
    "bf16": "compiled_fsdp, mixed precision in bfloat16",
    "wire_bf16": "**bfloat16 on the wire**",
    "wire_fp8_bf16": "**float8 gathers, bfloat16 reductions**",
    "wire_int8": "**int8 both ways**",
    "wire_int8_feedback": "**int8 both ways, error feedback**",
    "wire_int8_broken": "**int8 both ways, broken after every layer**",
    "float8": "compiled_fsdp, torchao's float8 weights",
    "fsdp2_float8": "FSDP2, torchao's float8 weights",
    "accumulate_each": "compiled_fsdp, reduce and reshard",
    "accumulate_wait": "compiled_fsdp, wait and keep",
    "fsdp2_accumulate_each": "FSDP2, reduce and reshard",
    "fsdp2_accumulate_wait": "FSDP2, wait and keep",
    "budget_100": "budget of 100 %",
    "budget_80": "budget of 80 %",
    "budget_60": "budget of 60 %",
    "budget_45": "budget of 45 %, or the least",
}
"""The titles that docs/benchmarks.md gives to the systems of ``bench.real_link``, in the order of its rows."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return one Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def slow_link(records: Sequence[Record]) -> str:
    """Return a table for each setting of ``bench.real_link``, with notes: rounds, share of collectives, losses."""
    settings = itertools.groupby(records, lambda r: (r["model"], r["layout"], r["link"], r["batch"]))
    return "\n".join(_setting(*key, list(found)) for key, found in settings)


def _setting(model: str, layout: str, rate: str, batch: int, records: Sequence[Record]) -> str:
    by_name = {record["system"]: record for record in records}
    several = LAYOUTS[layout].ranks_per_machine > 1
    columns = {
        "step, s": lambda r: _around(r["step_s"], r["step_ci_s"]),
        "of FSDP2": lambda r: _ratio(r, "fsdp2", "ratio_to_fsdp2", "ratio_ci"),
        "of the whole graph": lambda r: _ratio(r, "compiled_fsdp", "ratio_to_whole", "ratio_to_whole_ci"),
        "of reducing each": lambda r: _ratio(r, "accumulate_each", "ratio_to_each", "ratio_to_each_ci"),
        "forward, s": lambda r: f"{r['forward_s']:.2f}",
        "backward, s": lambda r: f"{r['backward_s']:.2f}",
        "peak, MB": lambda r: "" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 1e6:.0f}",
        "sent, MB": lambda r: f"{r['wire_bytes'] / 1e6:.0f}",
        "inside, MB": lambda r: f"{r['inside_bytes'] / 1e6:.0f}",
    }
    if not {"broken", "broken_inside", "broken_autograd", "blocks"} & by_name.keys():
        del columns["of the whole graph"]
    if not {"accumulate_each", "accumulate_wait"} <= by_name.keys():
        del columns["of reducing each"]
    if not several:
        del columns["inside, MB"]
    rows = [
        [text, *(cell(by_name[name]) for cell in columns.values())] for name, text in SYSTEMS.items() if name in by_name
    ]
    first = records[0]
    gbit = rate.removesuffix("gbit")
    title = f"{model}, {LAYOUTS[layout].text}, {gbit} Gb/s, batch {batch}"
    notes = [f"Medians of {first['rounds']} rounds, intervals hold the median with {first['ci_coverage']:.0%}."]
    if {"floor_wire_fsdp2", "floor_compute"} <= by_name.keys():
        share = by_name["floor_wire_fsdp2"]["step_s"] / by_name["floor_compute"]["step_s"]
        notes.append(f"FSDP2's collectives alone take {share:.2f} times compute alone.")
    if (predicted := by_name.get("compiled_fsdp", {}).get("predicted_s")) is not None:
        measured = by_name["compiled_fsdp"]["step_s"]
        notes.append(f"Predicted {predicted:.2f} s: measured / predicted is {measured / predicted:.2f}.")
    losses = {record["loss"] for record in records if record["loss"] is not None}
    if len(losses) > 1:
        notes.append(f"Last losses between {min(losses):.7f} and {max(losses):.7f}.")
    elif losses:
        notes.append(f"Last loss of all: {losses.pop():.7f}.")
    return f"{title}:\n\n{table(['system', *columns], rows)}\n{' '.join(notes)}\n"


def predictions(records: Sequence[Record]) -> str:
    """Return a table of measured steps and their ratios to predicted ones, a row for each setting."""
    head = ["Gb/s", "batch", "one graph, s", "/ predicted", "graph breaks, s", "/ predicted"]
    head += ["compute alone, s", "/ predicted", "collectives alone, s", "/ predicted", "of the floor"]
    rows = []
    for (rate, batch), found in itertools.groupby(records, lambda r: (r["link"], r["batch"])):
        by_name = {record["system"]: record for record in found}
        parts = by_name["compiled_fsdp"]["predicted_parts_s"]
        pairs = [(by_name[name], by_name[name]["predicted_s"]) for name in ("compiled_fsdp", "broken")]
        pairs += [(by_name["floor_compute"], parts["compute"]), (by_name["floor_wire"], parts["collectives"])]
        cells = [rate.removesuffix("gbit"), f"{batch:,}"]
        for record, predicted in pairs:
            ratio = f"{record['step_s'] / predicted:.2f}" if predicted else ""
            cells += [_around(record["step_s"], record["step_ci_s"]), ratio]
        floor = max(by_name[name]["step_s"] for name in ("floor_compute", "floor_wire"))
        rows.append([*cells, f"{by_name['compiled_fsdp']['step_s'] / floor:.2f}"])
    return table(head, rows)


def _ratio(record: Record, of: str, ratio: str, interval: str) -> str:
    if record["system"] == of:
        return "1"
    return _around(record[ratio], record[interval]) if ratio in record else ""


def _around(value: float, interval: Sequence[float]) -> str:
    return f"{value:.2f} ({interval[0]:.2f} .. {interval[1]:.2f})"


def host_time(records: Sequence[Record]) -> str:
    """Return the table of ``bench.gpu --only host``."""
    steps = [record for record in records if record["bench"] == "host time of a step"]
    return table(
        ["system", "median, ms", "quartiles", "of FSDP2 eager"],
        [
            [
                record["system"],
                f"{1e3 * record['seconds']:.2f}",
                " .. ".join(f"{1e3 * quartile:.2f}" for quartile in record["quartiles"]),
                f"{record['ratio_to_fsdp2_eager']:.2f}",
            ]
            for record in steps
        ],
    )


def compile_time(records: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Return the table of ``bench.compile_time``: seconds by stage."""
    stages = list(next(iter(records.values()))[0])
    rows = []
    for name, runs in records.items():
        all_s = [run["all"] for run in runs]
        others = [f"{median(run[stage] for run in runs):.1f}" for stage in stages if stage != "all"]
        rows.append([name, f"{median(all_s):.1f} ({min(all_s):.1f} .. {max(all_s):.1f})", *others])
    return table(["system", *stages], rows)
