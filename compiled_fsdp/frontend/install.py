"""Ours under FSDP2's names: for a program that imports ``fully_shard`` from torch and is not to be edited."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

from compiled_fsdp.base.logs import speaks_for_all
from compiled_fsdp.compat.modules import torchs_fsdp2
from compiled_fsdp.frontend.fsdp_module import register_fsdp_forward_method, share_comm_ctx
from compiled_fsdp.frontend.fully_shard import fully_shard

log = logging.getLogger(__name__)
speaks_for_all(log)

# ``FSDPModule`` and the policies are not among them: ours are of torch's ``FSDPModule``, and take torch's policies as
# they are. So ``isinstance`` holds for modules of both.
_OURS = {function.__name__: function for function in (fully_shard, register_fsdp_forward_method, share_comm_ctx)}


class Installation:
    """What ``install()`` has done; as a context manager it is taken back at the end, by an exception too.

    Attributes:
        replaced: the full names that were torch's and are ours now, sorted; empty once they were taken back.
    """

    def __init__(self) -> None:
        self._places: list[tuple[types.ModuleType, str, Any]] = []
        torchs = [(getattr(torchs_fsdp2(), name), ours) for name, ours in _OURS.items()]
        for module in list(sys.modules.values()):
            if not isinstance(module, types.ModuleType) or module is torchs_fsdp2():
                continue
            if module.__name__.split(".")[0] == "compiled_fsdp":  # our own
                continue
            for name, value in list(vars(module).items()):
                for theirs, ours in torchs:
                    if value is theirs:
                        setattr(module, name, ours)
                        self._places.append((module, name, theirs))

    @property
    def replaced(self) -> tuple[str, ...]:
        return tuple(sorted(f"{module.__name__}.{name}" for module, name, _ in self._places))

    def uninstall(self) -> None:
        """Put torch's own functions back, once.

        What somebody else has replaced since stays, and a warning names it. Modules that were imported in between and
        copied a name keep ours; models that are sharded stay so.
        """
        places, self._places = self._places, []
        for module, name, theirs in reversed(places):
            if getattr(module, name, None) is _OURS[theirs.__name__]:
                setattr(module, name, theirs)
            else:
                log.warning(
                    "uninstall: %s.%s is neither ours nor torch's by now; it stays as it is.", module.__name__, name
                )

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *_: Any) -> None:
        self.uninstall()

    def __repr__(self) -> str:
        return f"<compiled_fsdp.install(): {', '.join(self.replaced) or 'nothing'} replaced>"


def install() -> Installation:
    """Replace FSDP2's ``fully_shard``, ``register_fsdp_forward_method`` and ``share_comm_ctx`` by ours.

    They are replaced in ``torch.distributed.fsdp`` and in every module that has copied them: one line for a program
    that cannot be edited. Call it before the program shards.

    What is imported later takes ours from torch. A second call replaces what it finds of torch's since the first.
    Functions that are kept elsewhere (as a class's attribute, in a list) are not found. Compile with
    ``backend="compiled_fsdp"``, by the program's own option for it: models train without, too, but then nothing is
    planned.

    Returns: what was replaced (also logged at INFO), with ``uninstall()``; a context manager that calls it.
    """
    installation = Installation()
    log.info("install: ours in the place of %s", ", ".join(installation.replaced) or "nothing: all are ours already")
    return installation
