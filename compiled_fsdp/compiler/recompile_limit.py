"""Compile variants of a function past Dynamo's recompile limits, and in spite of the stance ``eager_on_recompile``.

Batch sizes may differ between ranks, so one rank alone may reach ``torch._dynamo.config.recompile_limit``. From then on
torch would run the function uncompiled on this rank, with other collectives, in another order, than the compiled code
of the other ranks. The rank cannot ask them to run uncompiled code too, because they are in the middle of a step. So it
goes on compiling. At the last limit, ``accumulated_recompile_limit``, it raises an error.
``torch.compiler.set_stance("eager_on_recompile")`` counts as a limit that is reached with the existing variants.
"""

# Why: docs/design/ranks.md, "No rank runs uncompiled at a recompile limit"

from __future__ import annotations

import logging
import re
from types import CodeType

from compiled_fsdp.base.errors import CompiledFsdpError
from compiled_fsdp.compat.dynamo import code_being_compiled, compile_past_recompile_limits
from compiled_fsdp.compat.stances import stance_is_eager_on_recompile
from compiled_fsdp.ranks.agreement import abandon_all

log = logging.getLogger(__name__)

_OF_SIZES = re.compile(r"(size|stride)s? mismatch|\.size\(\)|\.stride\(\)|\bs\d+\b")
"""Matches Dynamo's text on a failed guard on sizes. Its text on integer attributes of modules has advice of its own."""

_over_limit: set[str] = set()
_told_of_stance: set[str] = set()


class RecompileLimit(CompiledFsdpError, RuntimeError):
    """One rank has reached the last of Dynamo's limits on variants of one function."""


def compile_past_limits() -> None:
    """While the backend compiles for several ranks: let it compile past Dynamo's limits from now on."""
    compile_past_recompile_limits(on_recompile_limit)
    _warn_of_stance()


def on_recompile_limit(code: CodeType, name: str, value: int, last: bool, reason: str) -> None:
    """Let another variant be compiled, with one warning for each function.

    Raises:
        RecompileLimit: at the last limit, on this rank. The other ranks hear of it at their next agreement.
    """
    function, limit = _name_of(code), f"torch._dynamo.config.{name} = {value}"
    if last:
        error = RecompileLimit(
            f"compiled_fsdp: {function} has reached {limit} on this rank. Uncompiled it would call other "
            f"collectives than the ranks that still run compiled code. The last variant was for: {reason}. "
            f"{_way_out(reason)} Or raise the limit."
        )
        abandon_all(error)
        raise error
    if function not in _over_limit:
        _over_limit.add(function)
        log.warning(
            "%s has reached %s on this rank, and is compiled again all the same, because uncompiled it would call "
            "other collectives than the ranks that still run compiled code. The reason: %s. %s",
            function,
            limit,
            reason,
            _way_out(reason),
        )


def _name_of(code: CodeType) -> str:
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"


def _way_out(reason: str) -> str:
    of_sizes = (
        "Let Dynamo make sizes symbolic (leave out dynamic=False, or torch._dynamo.mark_dynamic), or pad to a few. "
        if _OF_SIZES.search(reason)
        else ""
    )
    return of_sizes + "TORCH_LOGS=recompiles tells what each variant is for."


def _warn_of_stance() -> None:
    """Warn, once for each function, that it is compiled although a stance says to run it uncompiled."""
    if not stance_is_eager_on_recompile():
        return
    code = code_being_compiled()
    function = "a graph" if code is None else _name_of(code)
    if function not in _told_of_stance:
        _told_of_stance.add(function)
        log.warning(
            '%s is compiled on this rank in spite of torch.compiler.set_stance("eager_on_recompile"), because '
            "uncompiled it would call other collectives than the ranks that run compiled code. To run it uncompiled, "
            'call set_stance("force_eager") on every rank.',
            function,
        )
