"""``bench.all``: the commands are those of the page, and records become its tables."""

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

from bench import all as everything
from bench import link, tables

PAGE = Path(__file__).parent.parent.parent / "docs" / "benchmarks.md"


def test_every_command_is_on_the_page():
    page = " ".join(PAGE.read_text().split())
    for measurement in everything.MEASUREMENTS:
        assert f"`{measurement.command}`" in page, measurement.name
    assert len({m.name for m in everything.MEASUREMENTS}) == len(everything.MEASUREMENTS)


def test_without_root_it_names_what_needs_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(link.os, "geteuid", lambda: 1000)
    assert everything.main(["--only", "plans", "slow-link", "--out", str(tmp_path)]) == 2
    assert "need root, and slow-link run over a slow link. Run as root" in capsys.readouterr().err
    assert [m.name for m in everything.chosen(everything.parse(["--no-link", "--only", "plans", "slow-link"]))] == [
        "plans"
    ]


def test_what_fails_does_not_stop_the_others(monkeypatch, capsys, tmp_path):
    commands = []

    def run(command, stdout, **_):
        commands.append(command)
        stdout.write("0.4 ms\n")
        if "--json" in command:
            Path(command[-1]).write_text(
                json.dumps({"one": [{"all": 2.0, "Dynamo": 1.0}, {"all": 4.0, "Dynamo": 1.0}]})
            )
        return SimpleNamespace(returncode=int("bench/warm_start.py" in command))

    monkeypatch.setattr(subprocess, "run", run)
    names = ["compile-time", "import-time", "warm-start"]
    assert everything.main(["--quick", "--only", *names, "--out", str(tmp_path)]) == 1
    assert len(commands) == 3
    assert commands[1][1:] == ["bench/import_time.py", "--runs", "2"]
    results = (tmp_path / "results.md").read_text()
    assert "| one | 3.0 (2.0 .. 4.0) | 1.0 |" in results
    assert "```\n0.4 ms\n```" in results
    assert "warm-start" not in results
    assert "FAILED" in capsys.readouterr().out


def row(system, **more):
    return {
        "model": "llama", "layout": "hsdp", "link": "1gbit", "batch": 256, "system": system, "rounds": 5,
        "ci_coverage": 0.9375, "step_s": 2.0, "step_ci_s": [1.5, 2.5], "forward_s": 0.5, "backward_s": 1.5,
        "peak_bytes": 10**8, "wire_bytes": 2 * 10**8, "inside_bytes": 3 * 10**8, "loss": 4.5, **more,
    }  # fmt: skip


def test_a_table_of_the_slow_link():
    ratios = {"ratio_to_fsdp2": 0.5, "ratio_ci": [0.4, 0.6], "ratio_to_whole": 1.25, "ratio_to_whole_ci": [1, 1.5]}
    text = tables.slow_link([row("broken", **ratios), row("fsdp2"), row("compiled_fsdp", **ratios, predicted_s=1.6)])
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows[0].count("|") == rows[1].count("|") == rows[2].count("|") == 10
    assert rows[2] == (
        "| **compiled_fsdp** | 2.00 (1.50 .. 2.50) | 0.50 (0.40 .. 0.60) | 1 | 0.50 | 1.50 | 100 | 200 | 300 |"
    )
    assert [re.split(r" \| ", line)[2:4] for line in rows[3:]] == [
        ["1", ""],
        ["0.50 (0.40 .. 0.60)", "1.25 (1.00 .. 1.50)"],
    ]
    assert "measured / predicted is 1.25" in text
    assert "Last loss of all: 4.5000000." in text
    assert "inside" not in tables.slow_link([row("fsdp2", layout="two")])


def test_a_table_of_predictions():
    parts = {"compute": 1.6, "collectives": 2.5}
    records = [
        row("compiled_fsdp", predicted_s=1.6, predicted_parts_s=parts, step_s=2.4),
        row("broken", predicted_s=2.5),
        row("floor_compute"),
        row("floor_wire", step_s=1.0),
    ]
    lines = tables.predictions(records).splitlines()
    assert lines[2] == (
        "| 1 | 256 | 2.40 (1.50 .. 2.50) | 1.50 | 2.00 (1.50 .. 2.50) | 0.80 | 2.00 (1.50 .. 2.50) | 1.25 | "
        "1.00 (1.50 .. 2.50) | 0.40 | 1.20 |"
    )
    assert len(lines) == 3
