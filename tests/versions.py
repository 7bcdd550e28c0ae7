"""Run the test suite on several versions of torch, and on a nightly if there is one; print a table of the results.

    python -m tests.versions 2.11.0 2.13.0 2.14.1 2.15.0 [--nightly] [-- pytest's arguments]

Each run is ``make test TORCH=...``, in its own environment (5 GB each, kept). The nightly is the newest version that
pip finds with ``--pre``, if it is newer than the newest release; set ``PIP_EXTRA_INDEX_URL`` to an index that has
nightlies. Exits with 1 if a run failed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Result(NamedTuple):
    """The suite's result on one version. ``says`` is pytest's last line, or the reason why the suite did not run."""

    torch: str
    passed: bool | None
    says: str


def nightly_of(listed: str) -> str | None:
    """Return the newest version in the output of ``pip index versions --pre``; None if it is a release."""
    found = re.search(r"Available versions: ([^,\s]+)", listed)
    return found[1] if found and re.search(r"(a|b|rc|dev)\d", found[1]) else None


def last_line(output: str) -> str:
    """Return pytest's summary, for example "2 failed, 1400 passed in 1200.00s"."""
    found = [line.strip("= ") for line in output.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    return found[-1] if found else (output.strip().splitlines() or ["nothing was said"])[-1]


def run(version: str, arguments: Sequence[str]) -> Result:
    """Run the suite on one version, and print its output as it comes."""
    process = subprocess.Popen(
        ["make", "test", f"TORCH={version}", f"ARGS={' '.join(arguments)}"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    return Result(version, process.wait() == 0, last_line("".join(lines)))


def table(results: Sequence[Result]) -> str:
    """Return the results as a Markdown table."""
    words = {True: "passed", False: "failed", None: "skipped"}
    rows = [f"| {of.torch} | {words[of.passed]} | {of.says} |" for of in results]
    return "\n".join(["| torch | suite | says |", "|---|---|---|", *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+")
    parser.add_argument("--nightly", action="store_true", help="and a nightly, if pip finds one")
    own, _, arguments = " ".join(sys.argv[1:]).partition(" -- ")
    options = parser.parse_args(own.split())
    results = [run(version, arguments.split()) for version in options.versions]
    if options.nightly:
        command = [sys.executable, "-m", "pip", "index", "versions", "torch", "--pre"]
        nightly = nightly_of(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
        if nightly is None:
            why = "pip finds no pre-release: set PIP_EXTRA_INDEX_URL to an index that has nightlies"
            results.append(Result("nightly", None, why))
        else:
            results.append(run(nightly, arguments.split()))
    print(table(results))
    return 1 if any(of.passed is False for of in results) else 0


if __name__ == "__main__":
    sys.exit(main())
