"""compiled_fsdp under FSDP2's names, for a program that imports ``fully_shard`` from torch and cannot be edited."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

from compiled_fsdp.base.logs import speaks_for_all
from compiled_fsdp.compat.modules import torchs_fsdp2, torchs_replicate
from compiled_fsdp.frontend.fsdp_module import register_fsdp_forward_method, share_comm_ctx
from compiled_fsdp.frontend.fully_shard import fully_shard
from compiled_fsdp.frontend.replicate import replicate

log = logging.getLogger(__name__)
speaks_for_all(log)

# ``FSDPModule`` and the policies are not replaced, because compiled_fsdp's modules are instances of torch's
# ``FSDPModule``, and compiled_fsdp takes torch's policies as they are.
_OURS = {
    function.__name__: function for function in (fully_shard, replicate, register_fsdp_forward_method, share_comm_ctx)
}


class Installation:
    """The replacements that ``install()`` has made. As a context manager it undoes them at the end, or after an error.

    Attributes:
        replaced: the full names that mean compiled_fsdp's functions now, sorted; empty after ``uninstall()``.
    """

    def __init__(self) -> None:
        self._places: list[tuple[types.ModuleType, str, Any]] = []
        torchs = [
            (torchs_replicate() if ours is replicate else getattr(torchs_fsdp2(), name), ours)
            for name, ours in _OURS.items()
        ]
        for module in list(sys.modules.values()):
            if not isinstance(module, types.ModuleType) or module is torchs_fsdp2():
                continue
            if module.__name__.split(".")[0] == "compiled_fsdp":
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
        """Put torch's own functions back. A second call does nothing.

        A name that other code has replaced meanwhile stays, and a warning names it. Modules that were imported
        meanwhile and copied a function keep compiled_fsdp's. Models that are sharded stay as they are.
        """
        places, self._places = self._places, []
        for module, name, theirs in reversed(places):
            if getattr(module, name, None) is _OURS[theirs.__name__]:
                setattr(module, name, theirs)
            else:
                log.warning(
                    "uninstall: other code has replaced %s.%s since install(), so it stays as it is.",
                    module.__name__,
                    name,
                )

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *_: Any) -> None:
        self.uninstall()

    def __repr__(self) -> str:
        return f"<compiled_fsdp.install(): {', '.join(self.replaced) or 'nothing'} replaced>"


def install() -> Installation:
    """Replace FSDP2's ``fully_shard``, ``replicate`` and two more functions with compiled_fsdp's.

    The other two are ``register_fsdp_forward_method`` and ``share_comm_ctx``. All are replaced in
    ``torch.distributed.fsdp`` and in every module that has copied them. ``replicate`` is the one that torch defines in
    ``torch.distributed._composable.replicate_with_fsdp``. It is one line for a
    program that cannot be edited. Call it before the program shards its model. For example::

        import compiled_fsdp

        compiled_fsdp.install()
        trainer.train()  # calls torch.distributed.fsdp.fully_shard

    Modules that are imported later get compiled_fsdp's functions from torch. A second call also replaces copies that
    have appeared since the first. Functions that are kept elsewhere (as a class's attribute, in a list) are not found.
    Compile with ``backend="compiled_fsdp"``, through the program's own option for it. With another backend, or
    uncompiled, models train as well, but nothing is planned.

    Returns: an ``Installation`` that lists the replaced names (also logged at INFO) and has ``uninstall()``; it is a
    context manager that calls ``uninstall()``.
    """
    installation = Installation()
    names = ", ".join(installation.replaced) or "nothing, because all names are replaced already"
    log.info("install: compiled_fsdp's functions replace %s", names)
    return installation
