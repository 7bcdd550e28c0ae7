"""``compiled-fsdp measure`` and ``compiled-fsdp hardware``."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from compiled_fsdp.compiler.measure import fit
from compiled_fsdp.compiler.samples import Samples
from compiled_fsdp.passes.cost import PROFILES, Curve
from compiled_fsdp.tools.cli.hardware import facts, hardware
from compiled_fsdp.tools.cli.measure import measure

ROOT = Path(__file__).parent.parent.parent


def run(*words: str) -> str:
    done = CliRunner().invoke(hardware, words)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPILED_FSDP_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_built_in_profiles_are_listed(cache):
    text = run("list")
    assert max(map(len, text.splitlines())) <= 100
    assert all(name in text for name in PROFILES)


def test_a_profile_is_shown():
    text = run("show", "h100")
    assert "ranks in a node" in text
    assert f"{PROFILES['h100'].memory / 1e9:,.0f}" in text
    assert run("show", "H100").lower() == text.lower()


def test_profiles_are_compared():
    rows = {line.split("  ")[0].strip(): line for line in run("compare", "h100", "cpu").splitlines()}
    ratio = PROFILES["cpu"].copy / PROFILES["h100"].copy
    assert f"({ratio:.3g}x)" in rows["copies, GB/s"]


def test_numbers_are_as_users_know_them():
    assert "80" in run("list").split("h100")[1].splitlines()[0].split()
    shown = run("show", "cpu")
    assert "any number" in shown


def test_a_latency_of_nothing_is_not_zero():
    rows = facts(replace(PROFILES["cpu"], gather={(2, 1): Curve(0.0, 1e9)}))
    assert rows["gather, 2 ranks on 1 node, us"] == "too short to tell"


def test_help_does_not_import_torch():
    code = "import sys; sys.argv = ['compiled-fsdp', '--help']; sys.modules['torch'] = None; main()"
    command = [sys.executable, "-c", f"from compiled_fsdp.tools.cli.main import main; {code}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("plan", "measure", "hardware"))


def test_what_is_no_profile_is_an_error(cache):
    (cache / "other.json").write_text("{}")
    for name, text in (("h1000", "hardware list"), (str(cache / "other.json"), "does not contain a Hardware")):
        done = CliRunner().invoke(hardware, ["show", name])
        assert done.exit_code == 2
        assert text in done.output.replace("\n", " ")


def test_residuals_are_what_a_curve_leaves():
    sizes, curve = (10**6, 10**7, 10**8), Curve(1e-4, 1e10)
    exact = tuple(curve.latency + size / curve.bytes_per_second for size in sizes)
    samples = Samples("gather", 2, 1, sizes, exact)
    assert samples.residuals(fit(sizes, exact)) == pytest.approx((0, 0, 0), abs=1e-9)
    slow = Samples("gather", 2, 1, sizes, (exact[0], 1.5 * exact[1], exact[2]))
    assert slow.residuals(curve) == pytest.approx((0, 0.5, 0))


@pytest.mark.more
def test_measured_and_listed(cache):
    """Two ranks measure; the result is in the list, and shown with its residuals."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "compiled_fsdp", "measure"]
    done = subprocess.run(
        [sys.executable, *command, "--device", "cpu"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "cpu, measured with 2 ranks" in done.stdout
    assert "off by" in done.stdout
    assert not re.search(r"\b(0\.000|1000000)\b", done.stdout)
    if "not kept" in done.stdout:
        pytest.skip("this machine does something else: nothing is kept that could be listed")
    name = done.stdout.split("kept as ")[1].split(",")[0]
    assert name in run("list")
    shown = run("show", name)
    assert "gather, 2 ranks on 1 node, GB/s" in shown
    assert "off by" in shown
    assert "x)" not in run("compare", name, name)


def test_measure_needs_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    done = CliRunner().invoke(measure, [])
    assert done.exit_code == 2
    assert "torchrun --nproc-per-node" in done.output
