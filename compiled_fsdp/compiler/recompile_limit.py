"""Variants of one compiled function past Dynamo's recompile limits.

Batch sizes may differ between ranks, so one rank alone may come to the limit
(``torch._dynamo.config.recompile_limit``). Torch would run the function uncompiled there from then on, and that rank
would call other collectives, in another order, than the others' compiled code. It cannot ask them to do the same: they
are in the middle of a step. So it goes on compiling; at ``accumulated_recompile_limit``, the last one, it fails.
"""

# Why: docs/design.md, note N35

from __future__ import annotations

import logging

from compiled_fsdp import compat
from compiled_fsdp.compiler.agreement import abandon_all

log = logging.getLogger(__name__)

_WAY_OUT = (
    "Where sizes differ, let Dynamo make them symbolic (leave out dynamic=False, or torch._dynamo.mark_dynamic), or "
    "pad to a few sizes; TORCH_LOGS=recompiles tells what each variant is for."
)


class RecompileLimit(RuntimeError):
    """One rank has come to the last of Dynamo's limits on variants of one function."""


def on_recompile_limit(limit: compat.LimitReached) -> None:
    """Let another variant be compiled, with one warning for each function.

    Raises:
        RecompileLimit: at the last limit, on this rank; the others hear of it when they come to an agreement.
    """
    name = f"torch._dynamo.config.{limit.name} = {limit.value}"
    if limit.last:
        error = RecompileLimit(
            f"compiled_fsdp: {limit.function} has come to {name} on this rank. Uncompiled it would call other "
            f"collectives than the ranks that still run compiled code. {_WAY_OUT} Or raise the limit. The last variant "
            f"was for: {limit.reason}"
        )
        abandon_all(error)
        raise error
    if limit.first:
        log.warning(
            "%s has come to %s on this rank, and is compiled again all the same: uncompiled it would call other "
            "collectives than the ranks that still run compiled code. %s The reason: %s",
            limit.function,
            name,
            _WAY_OUT,
            limit.reason,
        )
