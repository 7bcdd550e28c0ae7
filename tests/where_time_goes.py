"""Print where the test suite's time goes, by cause and by file, as Markdown tables.

    python -m tests.where_time_goes [pytest's arguments]

py-spy samples every process of the run ten times a second. A sample counts for the innermost cause on the stack. For
example, if Dynamo calls AOTAutograd, which calls compiled_fsdp's passes, it counts for the passes. A rank that waits
for work counts for nothing; a rank that waits in a collective counts for collectives. So the sum has the busy seconds
of all processes: two working ranks give two seconds per second.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

RATE = 10  # samples a second

# The innermost frame that matches one of these patterns decides. Paths are as py-spy prints them: relative to the
# folder on sys.path.
CAUSES = [
    ("tidying up between tests", r"^_tidy \(tests/harness/spawn"),
    ("our passes and planner", r"\((?:\S*/)?(?:compiled_fsdp/)?passes/"),
    ("our backend, ops and runtime", r"\((?:\S*/)?compiled_fsdp/"),
    ("Inductor", r"\(torch/_inductor/|\(triton/"),
    ("AOTAutograd", r"\(torch/_functorch/|\(torch/_subclasses/|\(torch/fx/experimental/proxy_tensor"),
    ("Dynamo", r"\(torch/_dynamo/(?!eval_frame)"),
    ("FSDP2", r"\(torch/distributed/fsdp/"),
    ("DTensor", r"\(torch/distributed/tensor/"),
    ("collectives", r"\(torch/distributed/(?:distributed_c10d|_functional_collectives)|^_gather \(tests/harness/spawn"),
    ("profiler", r"\(torch/profiler/|\(torch/autograd/profiler"),
]
START = "start and end of ranks, imports"
REST = "models, optimizers and the tests themselves"


def samples(path: Path) -> Iterator[tuple[list[str], float]]:
    """Yield each stack, outermost frame first, with its seconds. Command lines of processes may have line breaks."""
    for record in re.split(r"\n(?=process )", path.read_text().strip()):
        stack, count = record.rsplit(" ", 1)
        yield stack.split(";"), int(count) / RATE


def cause_of(frames: list[str]) -> str | None:
    """Return the cause that a thread is busy with; None if it waits, or if it is not its process's main thread."""
    functions = {frame.split(" ")[0] for frame in frames}
    if functions & {"Thread._bootstrap", "Ranks._collect", "_collect", "EpollSelector.select"}:
        return None  # collecting waits for ranks, which count themselves; the selector is in the ranks' fork server
    if "resource_tracker" in frames[-1]:
        return None
    if any("execnet/" in frame or "xdist/" in frame for frame in frames[-5:]):
        return None  # an xdist worker, or the process that gives it work, has none to do
    if "_serve" in functions and "_outcome" not in functions:
        return None if "_ConnectionBase.recv_bytes" in functions else START
    if "_outcome" not in functions and any("importlib" in frame for frame in frames):
        return START
    for frame in reversed(frames):
        for cause, pattern in CAUSES:
            if re.search(pattern, frame):
                return cause
    return REST


def by_cause(path: Path) -> Counter[str]:
    """Return the busy seconds of all processes by cause."""
    total: Counter[str] = Counter()
    for stack, seconds in samples(path):
        own = max(i for i, frame in enumerate(stack) if frame.startswith("process "))
        frames = stack[own + 1 :]
        if frames and (cause := cause_of(frames)) is not None:
            total[cause] += seconds
    return total


def by_file(path: Path) -> Counter[str]:
    """Return the seconds that the tests of each file take, fixtures included."""
    total: Counter[str] = Counter()
    for case in ElementTree.parse(path).iter("testcase"):
        total[case.get("classname", "").replace(".", "/") + ".py"] += float(case.get("time", "0"))
    return total


def table(head: str, rows: Counter[str]) -> Iterator[str]:
    yield f"| {head} | seconds | share |"
    yield "|---|---|---|"
    whole = sum(rows.values())
    for name, seconds in rows.most_common():
        yield f"| {name} | {seconds:.0f} | {seconds / whole:.0%} |"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        stacks, times = Path(folder, "stacks"), Path(folder, "times.xml")
        pytest = [sys.executable, "-m", "pytest", "-q", f"--junitxml={times}", *sys.argv[1:]]
        spy = [
            str(Path(sys.executable).with_name("py-spy")),  # this environment's, even if the environment is not active
            "record",
            "--subprocesses",
            "--idle",
            "--rate",
            str(RATE),
            "--format",
            "raw",
            "--output",
            str(stacks),
        ]
        start = time.monotonic()
        done = subprocess.run([*spy, "--", *pytest], check=False)
        print(f"\n{time.monotonic() - start:.0f} s\n")
        print(*table("cause, busy seconds of all processes", by_cause(stacks)), sep="\n")
        print()
        print(*table("file, elapsed seconds", by_file(times)), sep="\n")
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
