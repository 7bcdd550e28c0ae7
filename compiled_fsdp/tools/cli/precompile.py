"""``compiled-fsdp precompile``: compile a training script for a job of many ranks, on one machine."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from compiled_fsdp.compiler.precompiled import PRECOMPILING, save_precompiled
from compiled_fsdp.tools.cli.plan import FILE, Several


def _ranks(text: str) -> range:
    """Parse a rank, "3", or several, "0-7"."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


@click.command()
@click.option(
    "--script", required=True, type=click.Path(exists=True, dir_okay=False), help="The program that trains, train.py."
)
@click.option("--world-size", required=True, type=click.IntRange(1), help="Number of ranks of the job.")
@click.option(
    "--local-world-size", type=click.IntRange(1),
    help="Ranks on each machine, as torchrun's --nproc-per-node; by default all of them.",
)  # fmt: skip
@click.option(
    "--ranks", type=Several("ranks", _ranks), default="0", show_default=True,
    help="The ranks to compile for, one after another: 0,2 or 0-7. One is enough where all run the same code.",
)  # fmt: skip
@click.option(
    "--steps", type=click.IntRange(1), default=1, show_default=True,
    help="Steps of an optimizer after which the script is stopped.",
)  # fmt: skip
@click.option("--out", required=True, type=FILE, help="The file to write, for compiled_fsdp.load_precompiled.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def precompile(
    script: str, world_size: int, local_world_size: int | None, ranks: tuple[range, ...], steps: int, out: Path,
    arguments: tuple[str, ...],
) -> None:  # fmt: skip
    """Compile a training script for a job, on one machine: write a file that the job's ranks load.

    The script runs with the ARGUMENTS behind -- among ranks that do not exist, until its optimizer has taken a step. It
    must compile with backend="compiled_fsdp", and needs the same kind of device as the job.
    """
    local = world_size if local_world_size is None else local_world_size
    if world_size % local:
        raise click.UsageError(f"--local-world-size {local} does not divide --world-size {world_size}.")
    numbers = list(itertools.chain(*ranks))
    if not numbers or max(numbers) >= world_size:
        raise click.UsageError(f"--ranks must be below --world-size {world_size}, as in 0,2 or 0-7.")
    if not out.parent.is_dir():
        raise click.BadParameter(f"there is no folder {str(out.parent)!r}.", param_hint="--out")
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        cache, facts = Path(name) / "cache", Path(name) / "facts.json"
        cache.mkdir(mode=0o700)
        for rank in track(numbers, "compiling", console=console, disable=not console.is_terminal, transient=True):
            job: dict[str, Any] = {
                "RANK": rank,
                "LOCAL_RANK": rank % local,
                "WORLD_SIZE": world_size,
                "LOCAL_WORLD_SIZE": local,
            }
            job |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 0, "TORCHINDUCTOR_CACHE_DIR": cache, PRECOMPILING: 1}
            environment = {**os.environ, **{key: str(value) for key, value in job.items()}}
            if local > 1:  # as torchrun does; torch's caches know the number of threads
                environment.setdefault("OMP_NUM_THREADS", "1")
            command = [sys.executable, "-m", "compiled_fsdp.tools.fake_job", str(facts), str(steps), script, *arguments]
            if code := subprocess.run(command, env=environment, check=False).returncode:
                raise click.ClickException(
                    f"{script} failed as rank {rank} (exit status {code}); what it said is above."
                )
        compiles = save_precompiled(out, cache, json.loads(facts.read_text()), numbers)
    if not compiles:
        raise click.ClickException(
            f"{script} compiled nothing that can be kept: it needs torch.compile(..., backend='compiled_fsdp') with "
            "Inductor's code (not codegen='aot_eager', not CUDA graphs, not compiled autograd), and torch's caches on."
        )
    what = f"{compiles} compile{'s' * (compiles > 1)}"
    Console().print(f"{out}: code for {what}, {out.stat().st_size / 1e6:,.1f} MB", soft_wrap=True)
