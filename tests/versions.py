"""The suite on every torch that is supported, and on a nightly where one is to be had; a table of how it went.

    python -m tests.versions 2.11.0 2.13.0 2.14.1 2.15.0 [--nightly] [-- pytest's arguments]

Each is ``make test TORCH=...``, in an environment of its own (5 GB each, kept). A nightly is what pip finds with
``--pre`` that is newer than the newest release; set ``PIP_EXTRA_INDEX_URL`` to an index that has them. Exits with 1 if
any failed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Result(NamedTuple):
    """How the suite went on a version: pytest's last line, or why there was none."""

    torch: str
    passed: bool | None
    says: str


def nightly_of(listed: str) -> str | None:
    """The newest version in what ``pip index versions --pre`` says, if it is no release."""
    found = re.search(r"Available versions: ([^,\s]+)", listed)
    return found[1] if found and re.search(r"(a|b|rc|dev)\d", found[1]) else None


def last_line(output: str) -> str:
    """Pytest's summary: "2 failed, 1400 passed in 1200.00s"."""
    found = [line.strip("= ") for line in output.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    return found[-1] if found else (output.strip().splitlines() or ["nothing was said"])[-1]


def run(version: str, arguments: Sequence[str]) -> Result:
    """The suite on one version; what it says goes on as it comes."""
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
    """The results in Markdown."""
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
