"""``compiled-fsdp env``: the facts for a bug report."""

import getpass
import socket
from pathlib import Path

import torch
from click.testing import CliRunner

from compiled_fsdp.compat import patches
from compiled_fsdp.tools.cli.env import env


def printed() -> str:
    done = CliRunner().invoke(env)
    assert done.exit_code == 0, done.output
    return done.output


def test_versions_devices_and_patches():
    said = printed()
    assert f"torch:             {torch.__version__}" in said
    assert f"patches:           all {len(patches.PATCHES)} fit\n" in said
    assert "CPU cores:" in said
    assert "gloo" in said


def test_a_patch_that_does_not_fit(monkeypatch):
    broken = patches.PATCHES[0]
    monkeypatch.setattr(type(broken), "problem", lambda patch: "is gone" if patch is broken else "")
    assert f"patches:           {broken.name} is gone\n" in printed()


def test_nothing_private(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / "secret"))
    monkeypatch.setenv("NCCL_COMM_ID", "10.0.0.7:2222")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    for name in ("HF_TOKEN", "CI_JOB_TOKEN", "TORCH_API_KEY"):
        monkeypatch.setenv(name, "hidden")
    said = printed()
    assert "TORCHINDUCTOR_CACHE_DIR=(set)" in said
    assert "NCCL_COMM_ID=(set)" in said
    assert "NCCL_ALGO=Ring" in said
    for private in (
        "hidden",
        "secret",
        "10.0.0.7",
        "TOKEN",
        "API_KEY",
        str(Path.home()),
        socket.gethostname(),
        f"{getpass.getuser()}@",
    ):
        assert private not in said
