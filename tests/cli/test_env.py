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
    monkeypatch.setenv("COMPILED_FSDP_TOKEN_LIKE", "shown")
    monkeypatch.setenv("HF_TOKEN", "hidden")
    said = printed()
    assert "TORCHINDUCTOR_CACHE_DIR=(a path)" in said
    assert "COMPILED_FSDP_TOKEN_LIKE=shown" in said
    for private in ("hidden", "secret", str(Path.home()), socket.gethostname(), f"{getpass.getuser()}@"):
        assert private not in said
