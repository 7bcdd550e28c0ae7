"""Which modules repeat.

A root unit is divided at them, so that one call of ``fully_shard`` is bucketed like a call for each layer.
"""

# Why: docs/design.md, note N5

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The modules in ``module`` that a container holds several of, by class; the outermost ones."""
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    repeated = (
        {cls for cls, count in Counter(map(type, children)).items() if count > 1}
        if isinstance(module, _CONTAINERS)
        else ()
    )
    for child in children:
        if type(child) in repeated:
            yield child
        else:
            yield from repeated_blocks(child)
