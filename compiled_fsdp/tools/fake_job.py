"""Run a training script as one rank of a job whose other ranks do not exist, up to the end of an optimizer step.

    RANK=0 LOCAL_RANK=0 WORLD_SIZE=8 python -m compiled_fsdp.tools.fake_job FACTS STEPS train.py [ARGUMENTS]

``compiled-fsdp precompile`` runs it. Collectives communicate nothing, so numbers are wrong, but the script is compiled
as in the job.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from compiled_fsdp.compat.modules import fake_store
from compiled_fsdp.compiler.precompiled import facts_here


class _Done(BaseException):
    """All steps have ended. It is no ``Exception``, so that the script does not handle it."""


def main(facts: str, steps: int, script: str, *arguments: str) -> None:
    """Run ``script`` until one of its optimizers has taken ``steps`` steps, and write ``facts_here`` to a file."""
    taken: Counter[int] = Counter()

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        taken[id(optimizer)] += 1
        if taken[id(optimizer)] >= steps:
            raise _Done

    register_optimizer_step_post_hook(count)
    _make_groups_fake()
    Path(facts).write_text(json.dumps(facts_here()))
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    with contextlib.suppress(_Done):
        runpy.run_path(script, run_name="__main__")


def _make_groups_fake() -> None:
    """Let the script make process groups of ranks that do not exist, whatever it asks for."""
    new_group = dist.distributed_c10d.new_group

    def fake_init(*_: Any, **__: Any) -> None:
        if torch.cuda.is_available():  # as a device mesh does, but not for this backend
            torch.cuda.set_device(_variable("LOCAL_RANK") % torch.cuda.device_count())
        init("fake", store=fake_store(), rank=_variable("RANK"), world_size=_variable("WORLD_SIZE"))

    def fake_new(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(new_group).bind(*args, **kwargs)
        others = {name: value for name, value in given.arguments.items() if name not in ("pg_options", "device_id")}
        return new_group(**{**others, "backend": "fake"})

    init = dist.distributed_c10d.init_process_group
    modules: tuple[Any, ...] = (dist, dist.distributed_c10d, dist.device_mesh)
    for module in modules:
        module.init_process_group = fake_init
        module.new_group = fake_new


def _variable(name: str) -> int:
    return int(os.environ[name])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
