"""Launches on several machines: two of torchrun on this one, and Slurm's script as far as a shell can tell."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from tests.clients import recipe

pytestmark = pytest.mark.more

ROOT = Path(__file__).parents[2]
SIZE = "--steps 4 --batch 4 --dim 64 --layers 1 --seq-len 16 --codegen aot_eager --eval-every 4"
PAGE = "several-machines.md"


def launch(command: str) -> subprocess.Popen:
    """A command of the page in the repository's root, with this interpreter's torchrun."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        ["bash", "-c", command.replace("torchrun", f"{sys.executable} -m torch.distributed.run", 1)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def losses(*machines: subprocess.Popen) -> list[str]:
    """The lines of losses, which the demo's first rank writes, once all have ended well."""
    try:
        said = [machine.communicate(timeout=500)[0] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert [machine.returncode for machine in machines] == [0] * len(machines), "\n".join(said)
    return [line for text in said for line in text.splitlines() if re.match(r"step \d+: training loss", line)]


def free_endpoint() -> tuple[str, str]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return "localhost", str(probe.getsockname()[1])


def test_torchrun(tmp_path):
    """Two launches of one rank each, by the page's command: the losses of one launch of two."""
    on_eight = recipe("With torchrun", page=PAGE).replace("\\\n", " ")
    assert on_eight.count("--nproc-per-node 8") == on_eight.count("HOST:29500") == on_eight.count("/shared/run") == 1
    rendezvous = re.search(r"--rdzv-id 1 .* --rdzv-endpoint HOST:29500", on_eight)
    (static,) = re.findall(r"`(--node-rank 0 .*?)`", (ROOT / "docs" / PAGE).read_text().replace("\n  ", " "))

    def command(folder: str, ranks: int, meeting: str, machines: int = 2) -> str:
        text = on_eight.replace(rendezvous[0], meeting)
        text = text.replace("--nnodes 2", f"--nnodes {machines}").replace(
            "--nproc-per-node 8", f"--nproc-per-node {ranks}"
        )
        return text.replace("/shared/run", str(tmp_path / folder)).rstrip() + f" {SIZE}"

    def on(host: str, port: str, text: str) -> subprocess.Popen:
        return launch(text.replace("29500", port).replace("HOST", host))

    alone = losses(launch(command("alone", 2, "--standalone", machines=1)))
    assert len(alone) == 1
    endpoint = free_endpoint()
    assert losses(*(on(*endpoint, command("c10d", 1, rendezvous[0])) for _ in range(2))) == alone
    endpoint = free_endpoint()
    by_number = [static.replace("--node-rank 0", f"--node-rank {number}") for number in range(2)]
    assert losses(*(on(*endpoint, command("static", 1, meeting)) for meeting in by_number)) == alone


def test_slurm(tmp_path):
    """There is no Slurm here: bash reads the script, and torchrun its options."""
    text = recipe("With Slurm", page=PAGE)
    assert len(text.splitlines()) <= 10
    (tmp_path / "train.sbatch").write_text(text)
    subprocess.run(["bash", "-n", tmp_path / "train.sbatch"], check=True)
    arguments = shlex.split(text.replace("\\\n", " ").partition("srun torchrun")[2])
    for variable, value in (("$SLURM_NNODES", "2"), ("$HOST", "localhost"), ("$SLURM_JOB_ID", "7")):
        assert any(variable in word for word in arguments), variable
        arguments = [word.replace(variable, value) for word in arguments]
    parsed = get_args_parser().parse_args(arguments)
    assert (parsed.nnodes, parsed.rdzv_endpoint, parsed.rdzv_id) == ("2", "localhost:29500", "7")
    assert Path(ROOT, parsed.training_script).exists()
