"""The command's entry point. It works without the command's libraries, so that it can say which one is missing."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

LIBRARIES = ("click", "plotly", "rich")
COMMANDS = {
    "env": "Say what is installed, for bug reports: versions, devices, profiles, patches.",
    "hardware": "List, show and compare profiles of hardware, built in or measured.",
    "measure": "Measure matrix products, copies and collectives of this machine.",
    "patches": "Say what is replaced inside torch, and whether the installed torch has it.",
    "plan": "Plan a training step for ranks that you do not have.",
    "precompile": "Compile a training script for a job of many ranks, on one machine.",
}
"""The commands, and their lines in the help.

A command is imported only when it is used, because it imports torch: so the help is quick.
"""


def main() -> None:
    """Run ``compiled-fsdp``, or ``python -m compiled_fsdp``."""
    try:
        import click

        class Commands(click.Group):
            def list_commands(self, ctx: click.Context) -> list[str]:
                return list(COMMANDS)

            def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
                if cmd_name not in COMMANDS:
                    return None
                command: Any = getattr(importlib.import_module(f"compiled_fsdp.tools.cli.{cmd_name}"), cmd_name)
                return command  # type: ignore[no-any-return]

            def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
                with formatter.section("Commands"):
                    formatter.write_dl(list(COMMANDS.items()))

        @click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
        @click.version_option(package_name="compiled_fsdp")
        def commands() -> None:
            """Fully sharded data parallelism done by the compiler: plans without hardware."""

        if os.getcwd() not in sys.path:  # as with `python -m`, so that a model's factory is found either way
            sys.path.insert(0, os.getcwd())
        commands(prog_name="compiled-fsdp")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in LIBRARIES:
            raise
        sys.exit(f"compiled-fsdp needs {error.name}, which is not installed: pip install {' '.join(LIBRARIES)}")
