"""Measure bucket kernels, compiled steps and host time on this machine's GPU.

    python -m bench.gpu [--json FILE] [--quick] [--only code copies codecs step host]

On a machine without a GPU it is a dry run with small sizes, and with torch's operations instead of the kernels. It then
prints which measurements are missing. FILE gets a list of records with the keys bench, system, bytes, tensors, seconds,
gbps, ratio_to_copy, and more.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.gpu import codecs, copies, host, step
from bench.gpu.record import Record, machine, not_measured

PARTS = ("code", "copies", "codecs", "step", "host")


def main() -> None:
    """Measure, print as it goes, and write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the records go")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats, as without a GPU")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="what to measure (all)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each system's step (%(default)s)")
    parser.add_argument(
        "--codegen", choices=("inductor", "aot_eager"), default="inductor", help="for host time (%(default)s)"
    )
    options = parser.parse_args()
    records = []
    for record in _measure(options):
        print(record, flush=True)
        records.append(record.to_json())
        if options.json is not None:  # after each record, so that a later failure loses none
            options.json.write_text(json.dumps(records, indent=1) + "\n")


def _measure(options: argparse.Namespace) -> Iterator[Record]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    quick = options.quick or device.type == "cpu"
    rounds = 1 if quick else options.rounds
    yield machine(device)
    if device.type == "cpu":
        yield not_measured("bucket kernels", "no GPU: what follows are torch's operations on the CPU, as a dry run")
        yield not_measured("step on a GPU", "no GPU: time on the CPU, no memory, no host synchronizations, no NCCL")
    if "code" in options.only:
        from bench.gpu import code  # imports Triton, which not every platform has

        yield from code.measure()
    if "copies" in options.only:
        yield from copies.measure(device, quick=quick)
    if "codecs" in options.only:
        yield from codecs.measure(device, quick=quick)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the steps run in their own processes, which need the memory
    if "step" in options.only:
        yield from step.measure(device, quick=quick, rounds=rounds)
    if "host" in options.only:
        yield from host.measure(device, quick=options.quick, codegen=options.codegen)


if __name__ == "__main__":
    main()
