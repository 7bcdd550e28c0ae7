"""Compiled autograd: the backward of a broken forward as one graph."""

# Why: docs/design.md, note N30

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

    For forwards with graph breaks, and for optimizers that step in gradient hooks: the update stands in the graph right
    after its gradient's reduction. A whole graph without such hooks gains nothing from it.

    Args:
        options: the backend's, as for ``torch.compile(model, backend="compiled_fsdp", options=...)``.
        more: single options by name, which go before those in ``options``: ``compiled_autograd(codegen="aot_eager")``.

    Raises:
        ValueError: an unknown option, or a bad value.
    """
    if more:
        given = vars(options) if isinstance(options, Options) else options
        options = {**(given or {}), **more}
    compile_with: Any = torch.compile  # whose annotation knows dictionaries alone
    return compiled_autograd_of(compile_with(backend="compiled_fsdp", options=Options.parse(options)))
