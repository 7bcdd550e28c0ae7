"""Compiled autograd: the backward of a broken forward as one graph."""

# Why: docs/design.md, note N30

from __future__ import annotations

import contextlib
from typing import Any

import torch

from compiled_fsdp.compat import compiled_autograd_of


def compiled_autograd(**options: Any) -> contextlib.AbstractContextManager[None]:
    """Capture each backward as one graph, and plan it as one::

        with compiled_autograd():
            loss.backward()

    For forwards with graph breaks, and for optimizers that step in gradient hooks: the update stands in the graph right
    after its gradient's reduction. A whole graph without such hooks gains nothing from it.

    Args:
        options: the backend's, as for ``torch.compile(model, backend="compiled_fsdp", options=...)``.
    """
    return compiled_autograd_of(torch.compile(backend="compiled_fsdp", options=options))
