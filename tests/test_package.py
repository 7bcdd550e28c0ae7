"""What `pip install .` gives a user: a wheel with everything in it, that runs, and that type checkers see."""

import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PROGRAM = """
import sys
import torch, torch.distributed as dist
import compiled_fsdp
from compiled_fsdp import explain, fully_shard

assert compiled_fsdp.__file__.startswith(sys.prefix), compiled_fsdp.__file__
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
model.compile(backend="compiled_fsdp", options={"codegen": "aot_eager", "collectives_at_world_size_1": True})
model(torch.ones(2, 4)).sum().backward()
print(explain(model))
dist.destroy_process_group()
"""

# An error that is expected has a comment; mypy says so where there is none.
TYPED = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from compiled_fsdp import (
    Explanation, FSDPModule, Hardware, Options, OverBudget, RankEnded, RanksDiffer, compiled_autograd, errors, explain,
    fully_shard, measure_hardware, profile,
)

x = torch.ones(1, 2)
model = nn.Sequential(nn.Linear(2, 2))
layers = [nn.Linear(2, 2)]
fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
model(x)

m = fully_shard(nn.Linear(2, 2))
m.set_requires_gradient_sync(False)
with m.no_sync():
    m(x).sum().backward()
torch.optim.AdamW(m.parameters())
units: list[FSDPModule] = fully_shard(layers)
for module in model.modules():
    if isinstance(module, FSDPModule):
        module.reshard()

Options(memory_budget="80GB", hardware="H100", bucket=[["*.weight"]], kernels=True, disable_passes=["bucket"])
Options(memory_budget=0.9, hardware=Hardware.from_json(""), bucket=25, kernels="auto", inductor={"max_autotune": True})
Options(hardware=7)  # type: ignore[arg-type]
Options(kernels=9)  # type: ignore[arg-type]
Options(bucket="modul")  # type: ignore[arg-type]
Options(prefetch="never")  # type: ignore[arg-type]
Options(memory_budget=b"80GB")  # type: ignore[arg-type]
Options(bukcet="auto")  # type: ignore[call-arg]

found: Explanation = explain(model, (x,), {"options": 1}, options=Options())
gain: float = found.advice[0].gain_seconds
explain(model, x)
explain(model, detail=True)  # type: ignore[call-arg]
with compiled_autograd({"codegen": "aot_eager"}), compiled_autograd(codegen="aot_eager"):
    pass
flops: float = measure_hardware().matmul("bfloat16")

try:
    with profile(model) as steps:
        steps.step()
except OverBudget as error:
    least: int = error.least
except (RanksDiffer, RankEnded) as error:
    text: RuntimeError = error
except errors.CompiledFsdpError:
    raise
"""


def run(*command: str, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The Python of a fresh environment that has the wheel, and torch from this one."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    for name in ("compiled_fsdp", "passes"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source), cwd=folder)
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"), cwd=folder)
    python = folder / "venv" / "bin" / "python"
    run(*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel), cwd=folder)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    # a path in a .pth file: the finder of an editable install that is there is not read
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib"))
    return python


@pytest.mark.more
def test_the_wheel_trains(installed, tmp_path):
    said = run(str(installed), "-c", PROGRAM, cwd=tmp_path)
    assert "2 compiled graphs, no graph breaks" in said


@pytest.mark.more
def test_type_checkers_see_the_wheel(installed, tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "use.py").write_text(textwrap.dedent(TYPED))
    flags = ("--strict", "--warn-unused-ignores", "--python-executable", str(installed), "--cache-dir", str(tmp_path))
    run(sys.executable, "-m", "mypy", *flags, "use.py", cwd=tmp_path)
