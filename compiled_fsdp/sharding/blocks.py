"""Find the repeated blocks of a model.

compiled_fsdp divides a root unit at them, so that one call of ``fully_shard`` gives the same buckets as a call for each
layer.
"""

# Why: docs/design/reads.md, "Only root units are divided into blocks"

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost blocks in ``module``: modules whose container holds several modules of the same class.

    For example, the layers in the ``nn.ModuleList`` of a transformer.
    """
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
