"""Run random programs: `python -m tests.fuzz --programs 1000`; see docs/testing.md, "Random programs"."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz import execute
from tests.fuzz.generate import generate
from tests.fuzz.judge import AFTER_OTHERS, Judge, Kind, Verdict
from tests.fuzz.mutations import MOST_PROGRAMS, MUTATIONS
from tests.fuzz.program import MODES, Program, from_json, to_json
from tests.fuzz.script import script_of
from tests.fuzz.shrink import shrink
from tests.fuzz.source import source_of
from tests.harness.cases import Pool
from tests.harness.spawn import PRELOAD

QUICK = ("eager", "aot_eager")
"""The modes that find every mutation in the least time."""


def main() -> int:
    """Run the fuzzer; return the number of findings."""
    arguments = _arguments()
    PRELOAD.append("tests.fuzz.preload")
    pool = Pool()
    try:
        judge = Judge(pool, shares=arguments.scripts > 1)
        if arguments.mutations is not None:
            return _mutations(pool, arguments)
        if arguments.replay:
            return _replay(Judge(pool), from_json(Path(arguments.replay).read_text()), arguments)
        return _campaign(judge, arguments)
    finally:
        pool.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=100, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first program's; the others follow")
    parser.add_argument(
        "--modes", help=f"in equal parts, of {', '.join(MODES)}; all, or {' and '.join(QUICK)} to mutate"
    )
    parser.add_argument(
        "--inductor-one-in", type=int, default=1, help="leave out other programs by Inductor", metavar="N"
    )
    parser.add_argument(
        "--scripts", type=int, default=1, help="how many programs have one model, and share its code", metavar="N"
    )
    parser.add_argument(
        "--ranks-differ", type=float, default=0.1, help="the share of models with a rank that runs other code at times"
    )
    parser.add_argument("--budgets", type=float, default=0.2, help="the share of models with a small memory budget")
    parser.add_argument(
        "--equal-layers", type=float, default=0.2, help="the share of models with equal layers that are traced once"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no program after so many")
    parser.add_argument(
        "--out", type=Path, default=Path("build/fuzz"), help="folder for findings, and a line per program"
    )
    parser.add_argument("--replay", help="run the program in this JSON file, and shrink it if it is a finding")
    parser.add_argument("--mutations", nargs="*", help="how many programs it takes to find each fault of mutations.py")
    parser.add_argument("--no-shrink", action="store_true", help="keep findings as they are")
    return parser.parse_args()


def _modes(arguments: argparse.Namespace, default: tuple[str, ...]) -> tuple[str, ...]:
    modes = default if arguments.modes is None else tuple(mode.strip() for mode in arguments.modes.split(","))
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise SystemExit(f"no such mode: {', '.join(unknown)}; there are {', '.join(MODES)}")
    return modes


def _campaign(judge: Judge, arguments: argparse.Namespace) -> int:
    modes = _modes(arguments, MODES)
    arguments.out.mkdir(parents=True, exist_ok=True)
    counts: Counter[tuple[str, str]] = Counter()
    traced_once: Counter[str] = Counter()
    deadline = time.monotonic() + 60 * arguments.minutes
    findings = 0
    for program in itertools.islice(_programs(arguments, modes), arguments.programs):
        if time.monotonic() > deadline:
            break
        began = time.monotonic()
        verdict = judge.verdict(program)
        seconds = time.monotonic() - began
        counts[program.mode, verdict.kind.value] += 1
        layers = sum(judge.pool.get(program.world).run(execute.take_traced_once)[0])
        traced_once[program.mode] += layers > 0
        with (arguments.out / "programs.jsonl").open("a") as file:
            line = {"seed": program.seed, "mode": program.mode, "world": program.world, "verdict": verdict.kind.value,
                    "about": verdict.about, "layers traced once": layers, "seconds": round(seconds, 1)}  # fmt: skip
            file.write(json.dumps(line) + "\n")
        if verdict.is_finding:
            findings += 1
            _keep(judge, program, verdict, arguments)
    _print_counts(counts, traced_once)
    return findings


def _programs(arguments: argparse.Namespace, modes: tuple[str, ...]) -> Iterator[Program]:
    """Yield the programs of the seeds from the first one on, without end."""
    by_inductor = 0
    for seed in itertools.count(arguments.seed):
        program = generate(
            seed, modes, arguments.scripts, arguments.ranks_differ, arguments.budgets, arguments.equal_layers
        )
        by_inductor += program.mode == "inductor"
        model = -(-by_inductor // arguments.scripts)
        if program.mode != "inductor" or model % arguments.inductor_one_in == 0:
            yield program


def _keep(judge: Judge, program: Program, verdict: Verdict, arguments: argparse.Namespace) -> Path:
    """Shrink a finding, and write the program, the script and the messages to its folder."""
    print(f"seed {program.seed}, {program.mode}: {verdict.kind.value}: {verdict.about}", flush=True)
    small = program
    if not arguments.no_shrink and not verdict.about.startswith(AFTER_OTHERS):
        alone = Judge(judge.pool)
        small = shrink(program, lambda smaller: alone.verdict(smaller).sort == verdict.sort)
    text = script_of(small, verdict.other, verdict.about.splitlines()[0])
    folder = arguments.out / f"{program.seed}-{program.mode.replace(' ', '-').replace(chr(39), '')}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "program.json").write_text(to_json(program))
    (folder / "small.json").write_text(to_json(small))
    (folder / "script.py").write_text(text)
    (folder / "said.txt").write_text(f"{verdict.kind.value}: {verdict.about}\n{verdict.text}")
    print(f"  {len(text.splitlines())} lines: {folder / 'script.py'}", flush=True)
    return folder


def _replay(judge: Judge, program: Program, arguments: argparse.Namespace) -> int:
    verdict = judge.verdict(program)
    print(source_of(program), f"{verdict.kind.value}: {verdict.about}", verdict.text, sep="\n")
    if verdict.is_finding:
        _keep(judge, program, verdict, arguments)
    return verdict.is_finding


def _mutations(pool: Pool, arguments: argparse.Namespace) -> int:
    """Return the number of mutations that are not found. Names in the command select mutations."""
    missed = 0
    print("| mutation | found after | judgement |\n|---|---|---|", flush=True)
    for mutation in arguments.mutations or MUTATIONS:
        found = _first_finding(pool, mutation, arguments)
        missed += found is None
        number, verdict = found or (MOST_PROGRAMS, Verdict(Kind.RIGHT, "not found"))
        print(f"| {mutation} | {number} | {verdict.kind.value}: {verdict.about.splitlines()[0][:90]} |", flush=True)
    return missed


def _first_finding(pool: Pool, mutation: str, arguments: argparse.Namespace) -> tuple[int, Verdict] | None:
    """Return the number and the verdict of the first program that finds a mutation, and is right without it."""
    for number in range(MOST_PROGRAMS):
        shares = {"budgets": arguments.budgets, "equal_layers": arguments.equal_layers}
        program = generate(arguments.seed + number, _modes(arguments, QUICK), **shares)
        verdict = Judge(pool, mutation).verdict(program)
        if verdict.is_finding and not Judge(pool).verdict(program).is_finding:
            return number + 1, verdict
    return None


def _print_counts(counts: Counter[tuple[str, str]], traced_once: Counter[str]) -> None:
    """Print the number of programs for each mode and verdict, and of those with layers that were traced once."""
    kinds = [kind.value for kind in Kind if any(key[1] == kind.value for key in counts)]
    print("| mode | programs | " + " | ".join(kinds) + " | layers traced once |\n|" + "---|" * (3 + len(kinds)))
    for mode in dict.fromkeys(mode for mode, _ in counts):
        row = [counts[mode, kind] for kind in kinds]
        print(f"| {mode} | {sum(row)} | " + " | ".join(map(str, (*row, traced_once[mode]))) + " |")


if __name__ == "__main__":
    sys.exit(main() > 0)
