"""``compiled_autograd()``: the backward of a forward with graph breaks as one graph."""

# Why: docs/design/graph-breaks.md, "Compiled autograd's graph is a region"

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from compiled_fsdp.compat.compiled_autograd import compiled_autograd_of
from compiled_fsdp.compiler.options import Options


def compiled_autograd(
    options: Options | Mapping[str, Any] | None = None, **more: Any
) -> contextlib.AbstractContextManager[None]:
    """Capture each backward as one graph, and plan it as one::

        with compiled_autograd({"memory_budget": "60GB"}):
            loss.backward()

    Use it for forwards with graph breaks, and for optimizers that step in gradient hooks, because the graph then has
    the update right after its gradient's reduction. A forward without graph breaks and without such hooks gains
    nothing.

    Args:
        options: the backend's options, as for ``torch.compile(model, backend="compiled_fsdp", options=...)``.
        more: single options by name, for example ``compiled_autograd(codegen="aot_eager")``. They override ``options``.

    Raises:
        ValueError: an unknown option, or a bad value.
    """
    if more:
        given = vars(options) if isinstance(options, Options) else options
        options = {**(given or {}), **more}
    compile_with: Any = torch.compile  # Any, because its annotation takes dictionaries only
    return compiled_autograd_of(compile_with(backend="compiled_fsdp", options=Options.parse(options)))
