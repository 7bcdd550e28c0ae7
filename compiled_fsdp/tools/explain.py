"""``explain``: report a model's compiled graphs, or plan a call that was not made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from compiled_fsdp.compiler.options import Options
from compiled_fsdp.compiler.preview import planned_graphs
from compiled_fsdp.tools.explanation import Explanation, explain_compiled
from compiled_fsdp.tools.table import need_rich


def explain(
    model: nn.Module,
    args: Sequence[Any] | torch.Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    details: bool = False,
    options: Options | Mapping[str, Any] | None = None,
) -> Explanation:
    """Explain a model's communication: a verdict on each compiled graph, and advice.

    After a step it reports the graphs that were compiled. If you give it a call's arguments, it captures and plans that
    call instead. Then nothing runs, and parameters, gradients, random numbers and later compiles stay as they are::

        model.compile(backend="compiled_fsdp")
        print(explain(model, (tokens,), {"labels": labels}))  # before the first step: a plan of the call
        model(tokens, labels=labels).loss.backward()
        print(explain(model))                                 # after the step: the compiled graphs

    All times are planned, for the hardware that the first lines name. ``explain`` is no collective call, so one rank
    may call it alone. In a step all ranks take the first rank's plan; a preview on another rank shows that rank's own
    plan.

    Each piece of advice is planned before it is given, each change alone, and its gain is the difference of simulated
    steps. Advice that gains less than 1 % is left out.

    Args:
        model: the sharded model, as it is or as ``torch.compile`` returned it.
        args: the positional arguments of a call to plan, as ``torch.export.export`` takes them; a single tensor means
            ``(tensor,)``. Tensors may be on the meta device, and so may the model.
        kwargs: the keyword arguments of a call to plan. Without ``args`` and ``kwargs``, the compiled graphs are
            reported.
        details: whether ``print`` shows a table of all collectives instead of the verdict. The table needs rich (``pip
            install rich``).
        options: the backend's options for a plan; by default those that ``torch.compile`` or ``model.compile`` was
            given.

    Returns:
        The explanation: ``print()`` it; ``.to_dict()`` is plain data, ``.advice`` and ``.graphs`` are objects; a
        notebook shows it as HTML.

    Raises:
        TypeError: ``args`` is neither a tuple, a list nor a tensor, or ``kwargs`` is not a dictionary.
        ValueError: the model has no sharded parameter, or an option is wrong.
        ImportError: ``details`` is set and rich is not installed.
        RuntimeError: torch.compile is switched off, so the call cannot be captured without running it.
    """
    if details:
        need_rich()
    known = explain_compiled(model, details=details)
    args, kwargs = _positional(args), _by_name(kwargs)
    if not args and kwargs is None:
        return known
    graphs, breaks = planned_graphs(model, args, kwargs, options=options)
    return Explanation(
        graphs,
        breaks,
        known.parameters,
        known.units,
        details=details,
        planned_only=True,
        other_backends=known.other_backends,
    )


def _positional(args: Any) -> Sequence[Any]:
    if isinstance(args, torch.Tensor):
        return (args,)
    if not isinstance(args, (tuple, list)):
        raise TypeError(
            f"explain: args must be a tuple of the call's positional arguments, but got {type(args).__name__}: write "
            "explain(model, (x,))."
        )
    return args


def _by_name(kwargs: Any) -> Mapping[str, Any] | None:
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(
            f"explain: kwargs must be a dictionary of the call's keyword arguments, but got {type(kwargs).__name__}: "
            "write explain(model, (x, y)) for two positional arguments."
        )
    return kwargs
