"""The command's entry point, which works without the libraries that it needs, to say so."""

from __future__ import annotations

import os
import sys

LIBRARIES = ("click", "plotly", "rich")


def main() -> None:
    """``compiled-fsdp``, and ``python -m compiled_fsdp``."""
    try:
        import click

        from compiled_fsdp.cli.hardware import hardware
        from compiled_fsdp.cli.measure import measure
        from compiled_fsdp.cli.plan import plan
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in LIBRARIES:
            raise
        sys.exit(f"compiled-fsdp needs {error.name}, which is not installed: pip install {' '.join(LIBRARIES)}")

    @click.group(context_settings={"help_option_names": ["-h", "--help"]})
    @click.version_option(package_name="compiled_fsdp")
    def commands() -> None:
        """Fully sharded data parallelism done by the compiler: plans without hardware."""

    for command in (plan, measure, hardware):
        commands.add_command(command)
    if os.getcwd() not in sys.path:  # `python -m` has it there; factories of models are found in both ways
        sys.path.insert(0, os.getcwd())
    commands(prog_name="compiled-fsdp")
