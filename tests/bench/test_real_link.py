"""What of ``bench.real_link`` runs without root: intervals, settings, one system's account."""

import subprocess
from types import SimpleNamespace

import pytest

from bench import link, real_link
from bench.medians import interval_of_median


@pytest.mark.parametrize(
    ("n", "low", "high", "coverage"),
    [(3, 0, 2, 0.75), (5, 0, 4, 0.9375), (6, 0, 5, 0.96875), (10, 1, 8, 0.978515625), (15, 3, 11, 0.96484375)],
)
def test_interval_of_a_median_is_the_one_of_the_textbooks(n, low, high, coverage):
    assert interval_of_median([float(i) for i in reversed(range(n))]) == (low, high, pytest.approx(coverage))


def test_one_value_has_no_interval():
    assert interval_of_median([2.0]) == (2.0, 2.0, 0.0)


def test_ratios_are_of_the_same_round():
    def record(*steps):
        return {
            "step_s": steps, "forward_s": steps, "backward_s": steps, "wire_bytes": [0] * len(steps), "peak_bytes": 0,
            "inside_bytes": [0] * len(steps), "reported_bytes": [0] * len(steps),
            "first_step_s": 9.0, "loss": 1.0,
        }  # fmt: skip

    system = SimpleNamespace(sharded=True, reshard=True, compiles=True, trains=True)
    records = {"fsdp2": record(1.0, 4.0, 2.0), "ddp": record(2.0, 2.0, 3.0)}
    row = real_link.summary(real_link.CASES["mlp"][0], records, dict.fromkeys(records, system))[1]
    assert (row["ratio_to_fsdp2"], row["ratio_ci"]) == (1.5, [0.5, 2.0])  # 3/2, 2/4, 2/1
    assert (row["step_s"], row["compile_s"]) == (2.0, 7.0)


def test_without_root_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(link.os, "geteuid", lambda: 1000)
    monkeypatch.setattr("sys.argv", ["real_link"])
    assert real_link.main() == 2
    assert "need root" in capsys.readouterr().err


def test_a_failed_command_removes_what_was_made(monkeypatch):
    ran = []

    def run(command, **_):
        ran.append(list(command))
        return SimpleNamespace(
            returncode=int(command[:2] == ["ip", "link"] or "link" in command), stderr="no", stdout=""
        )

    monkeypatch.setattr(subprocess, "run", run)
    network = link.Link("1gbit")
    with pytest.raises(RuntimeError, match="failed: no"):
        network.__enter__()
    assert [command[2:] for command in ran if "del" in command] == [["del", name] for name in network.namespaces]


def test_systems_are_named_alike():
    from bench.link_systems import SYSTEMS

    assert tuple(SYSTEMS) == (*real_link.NAMES, *real_link.ACCUMULATING)
