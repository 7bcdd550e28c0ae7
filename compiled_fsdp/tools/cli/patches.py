"""``compiled-fsdp patches``: list the functions of torch that are replaced, and check them on the installed torch."""

from __future__ import annotations

import textwrap

import click
import torch

from compiled_fsdp.compat.patches import PATCHES, Patch, required_names
from compiled_fsdp.compat.versions import is_there

WIDTH = 120
"""Columns of ``docs/patches.md``."""

_PAGE = """# What is replaced inside torch

Torch has no hook at these places, so its function is replaced by one that calls it: at the first `fully_shard`, at the
first compile, or while torch compiles. Nothing is replaced at import. If a function of the installed torch does not
have the parameters that the replacement needs, it stays as it is, and one warning says what does not work.
`compiled-fsdp patches` checks each of them, and the private names that are read, on the installed torch. This page is
the output of `compiled-fsdp patches --page`.
"""


@click.command()
@click.option("--page", is_flag=True, help="The table as docs/patches.md has it.")
def patches(page: bool) -> None:
    """List the functions of torch that are replaced, and check the installed torch: exit code 1 if one is missing."""
    if page:
        click.echo(_PAGE + "".join(map(_section, PATCHES)), nl=False)
        return
    problems = {patch: patch.problem() for patch in PATCHES}
    click.echo(f"torch {torch.__version__}")
    for patch, problem in problems.items():
        click.echo(f"{'ok ' if not problem else 'NOT'} {patch.name}" + (f" {problem}. {patch.lost}" if problem else ""))
    names = required_names()
    missing = sorted({f"{name.module}.{name.name}" for name in names if not is_there(name)})
    click.echo(
        f"{len(names)} private names are read: " + (f"not there: {', '.join(missing)}" if missing else "all there")
    )
    raise SystemExit(bool(missing or any(problems.values())))


def _section(patch: Patch) -> str:
    takes = " or ".join(f"`({', '.join(names)})`" for names in patch.parameters)
    reads = f", and `{'`, `'.join(patch.variables)}` of its caller `{patch.caller}`" if patch.caller else ""
    lines = (
        f"- Replaced: {patch.when}. It needs the parameters {takes}{reads}.",
        f"- Without it: {patch.lost}",
        f"- Torch would have to offer: {patch.instead}.",
    )
    wrapped = (textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for line in lines)
    return "\n".join([f"\n## `{patch.name}`\n", textwrap.fill(patch.why, WIDTH) + "\n", *wrapped, ""])
