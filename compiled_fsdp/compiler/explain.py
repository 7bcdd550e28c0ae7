"""``explain``: what was compiled of a model, or what would be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from compiled_fsdp.compiler.preview import planned_graphs
from compiled_fsdp.reporting.explain import Explanation, explain_compiled
from compiled_fsdp.reporting.table import need_rich


def explain(
    model: nn.Module, *args: Any, details: bool = False, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Explanation:
    """What became of a model's communication: a verdict on each compiled graph, and advice.

    ``print(explain(model))`` after a step tells what was compiled. ``print(explain(model, *args))`` before one captures
    the call ``model(*args)`` and plans it: nothing runs, and parameters, gradients, random numbers and what is compiled
    later stay as they are. Neither is a collective call: one rank may ask alone. In a step the ranks take the first
    rank's plan; another rank's preview is its own.

    Advice is planned again before it is given, each change alone, and its gain is the difference of simulated steps.
    What gains less than 1 % is not said.

    Args:
        model: the sharded model, as it is or as ``torch.compile`` returned it.
        args: of a call to plan; tensors may be on the meta device, and so may the model. None: what was compiled.
        details: whether ``print`` shows a table of all collectives instead of the verdict. It is drawn by rich
            (``pip install compiled_fsdp[tools]``).
        options: the backend's, for a plan; by default those that ``torch.compile`` was given, if ``model`` is what it
            returned.
        kwargs: of a call to plan.

    Returns:
        The explanation: ``print()`` it; ``.json()`` is plain data, ``.advice`` and ``.graphs`` are objects; a notebook
        shows it as HTML.

    Raises:
        ValueError: the model has no sharded parameter; a bad option.
        ImportError: ``details`` without rich.
        RuntimeError: torch.compile is switched off, so that a call could only be made.
    """
    if details:
        need_rich()
    known = explain_compiled(model, details=details)
    if not args and not kwargs:
        return known
    graphs, breaks = planned_graphs(model, args, kwargs, options=options)
    return replace(known, graphs=graphs, graph_breaks=breaks, prefetched={}, planned_only=True)
