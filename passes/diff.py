"""Log a pass's changes of a graph's text, if ``TORCH_LOGS=+compiled_fsdp.passes.diff`` asks for them."""

from __future__ import annotations

import difflib
import logging

from torch.fx import GraphModule

log = logging.getLogger(__name__)


def asked_for() -> bool:
    """Whether somebody named this logger itself: ``+compiled_fsdp`` already shows the whole graph after each pass."""
    return log.level == logging.DEBUG


def text_of(gm: GraphModule) -> str | None:
    """The graph as text; None if nobody asked for changes."""
    return gm.print_readable(print_output=False) if asked_for() else None


def log_changes(title: str, before: str | None, gm: GraphModule) -> None:
    """Log a unified diff from ``before`` (``text_of`` the graph before the pass) to ``gm``."""
    if before is not None and (after := text_of(gm)) is not None:
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", lineterm="")
        log.debug("%s changes:\n%s", title, "\n".join(lines) or "nothing")
