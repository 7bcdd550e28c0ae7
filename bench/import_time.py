"""The time that `import compiled_fsdp` adds to `import torch`.

    python bench/import_time.py [--runs 11] [--json]

Each pair has two fresh interpreters, one without the package and one with it, so that a machine that gets slower slows
both. Times are milliseconds of a whole process; `added` is the difference within each pair. `inside` is the time of the
import statement alone, after torch is imported: it has no noise from starting and ending two processes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

PROGRAM = "import time, torch; start = time.perf_counter(); {}; print(1000 * (time.perf_counter() - start))"


def run(statement: str) -> tuple[float, float]:
    """Return the milliseconds of a fresh interpreter that imports torch and runs `statement`, and of `statement`."""
    start = time.perf_counter()
    command = [sys.executable, "-c", PROGRAM.format(statement)]
    inside = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return 1000 * (time.perf_counter() - start), float(inside)


def summary(times: list[float]) -> dict[str, float]:
    """Return the median of `times`, their quartiles and their extremes."""
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    named = {"median": median, "q1": low, "q3": high, "min": min(times), "max": max(times)}
    return {name: round(value, 1) for name, value in named.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=11, help="pairs of interpreters, at least 2")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if options.runs < 2:
        parser.error("--runs must be at least 2")

    run("import compiled_fsdp")  # fills the disk cache
    times: dict[str, list[float]] = {"torch": [], "torch, compiled_fsdp": [], "added": [], "inside": []}
    for _ in range(options.runs):
        alone, _ = run("pass")
        both, inside = run("import compiled_fsdp")
        for values, value in zip(times.values(), (alone, both, both - alone, inside), strict=True):
            values.append(value)

    results = {name: summary(values) for name, values in times.items()}
    if options.json:
        print(json.dumps({"unit": "ms", "runs": options.runs, **results}))
        return
    print(f"milliseconds, {options.runs} runs each, torch imported by {sys.executable}")
    for name, values in results.items():
        print(
            f"{name:22} median {values['median']:8.1f}   quartiles {values['q1']:.1f} .. {values['q3']:.1f}"
            f"   range {values['min']:.1f} .. {values['max']:.1f}"
        )


if __name__ == "__main__":
    main()
