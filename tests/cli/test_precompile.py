"""``compiled-fsdp precompile``: a script is compiled once, and a job of two ranks takes the code from the file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from compiled_fsdp.tools.cli.precompile import precompile

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import compiled_fsdp
import beside  # a module of the script's folder

dist.init_process_group("gloo")
other = dist.new_group(backend="gloo")
path, steps = sys.argv[1], int(sys.argv[2])
loaded = path != "none" and compiled_fsdp.load_precompiled(path)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
compiled_fsdp.fully_shard(model[0])
compiled_fsdp.fully_shard(model)
step = torch.compile(model, backend="compiled_fsdp")
optimizer = torch.optim.AdamW(model.parameters())
for number in range(steps):
    loss = step(torch.full((5, 4), dist.get_rank() + 1.0)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print("from the cache", [graph.from_cache for graph in compiled_fsdp.explain(model).graphs])
    print("loss", loss.item())
if "COMPILED_FSDP_PRECOMPILING" in os.environ:
    sys.exit("it was not stopped after a step")
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "beside.py").write_text("")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def run(*words: object) -> Result:
    return CliRunner().invoke(precompile, [str(word) for word in words])


def job(script: Path, cache: Path, *words: str) -> str:
    """What two ranks of torchrun print."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("OMP_NUM_THREADS", None)  # torchrun sets it
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.more
def test_a_job_takes_the_code(script, tmp_path, monkeypatch):
    """From the first step on, in an empty cache folder, with the results of a job that compiles."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    out = tmp_path / "net.precompiled"
    done = run("--script", script, "--world-size", 2, "--out", out, "--", out, 3)
    assert done.exit_code == 0, done.output
    assert "code for 1 compile," in done.output
    compiled, taken = (job(script, tmp_path / name, path, "3") for name, path in (("a", "none"), ("b", str(out))))
    assert "from the cache [False, False]" in compiled
    assert "from the cache [True, True]" in taken
    assert compiled.split("loss")[1] == taken.split("loss")[1]


@pytest.mark.parametrize(
    ("text", "words", "why"),
    [
        ("raise SystemExit(3)", (), "failed as rank 0 (exit status 3)"),
        ("print('nothing')", (), "compiled nothing that can be kept"),
        ("", ("--local-world-size", "3"), "--local-world-size 3 does not divide --world-size 4"),
        ("", ("--ranks", "0-4"), "--ranks must be below --world-size 4"),
        ("", ("--ranks", "-1"), "'-1'"),
        ("", ("--ranks", "2-1"), "--ranks must be below"),
        ("", ("--local-world-sice", "2"), "No such option"),
    ],
    ids=["fails", "compiles nothing", "machines", "too many ranks", "no rank", "no ranks", "unknown option"],
)
def test_what_cannot_be_done_is_said(text, words, why, script, tmp_path):
    script.write_text(text)
    done = run("--script", script, "--world-size", 4, "--out", tmp_path / "out", *words)
    assert done.exit_code != 0
    assert why in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()
