"""The Dynamo backend: takes a graph and options, returns code, or code that raises the user's mistake."""

# Why: docs/design/ranks.md, "Errors are raised by the compiled code"
# Why: docs/design/torch.md, "Passes run before Inductor's cache"
# Why: docs/design/torch.md, "A backward is compiled with its forward"

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import GraphModule

from compiled_fsdp.base.progress import stage
from compiled_fsdp.compat.break_guards import forget_breaks
from compiled_fsdp.compat.dynamo import code_being_compiled, forget_code, our_backend, skip_our_frames
from compiled_fsdp.compat.nested_regions import inline_nested_regions
from compiled_fsdp.compiler.checks import checked_options
from compiled_fsdp.compiler.compilation import Compilation
from compiled_fsdp.compiler.options import Options
from compiled_fsdp.compiler.recompile_limit import compile_past_limits
from compiled_fsdp.compiler.region import find_region
from compiled_fsdp.compiler.user_buckets import PatternsDiffer
from compiled_fsdp.passes.plan.convert import PlanDoesNotFit
from compiled_fsdp.passes.plan.search import OverBudget
from compiled_fsdp.passes.verify import GraphIsWrong
from compiled_fsdp.ranks.agreement import agreement_of
from compiled_fsdp.ranks.failures import RanksDiffer
from compiled_fsdp.ranks.heartbeat import beating
from compiled_fsdp.reporting.compile_log import COMPILE_LOG
from compiled_fsdp.runtime.context import RUNTIME


@our_backend
def compiled_fsdp(
    gm: GraphModule,
    example_inputs: list[Any],
    *,
    options: Options | Mapping[str, Any] | None = None,
    mode: str | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """Compile a graph: the backend that ``torch.compile(model, backend="compiled_fsdp")`` calls with each graph.

    A user's mistake (an unknown option, ranks that differ, a module that FSDP2 has sharded) is raised when the compiled
    code is called, not here. Dynamo would wrap the error here, and ``suppress_errors`` would turn it into silent eager
    code.

    Args:
        gm: Dynamo's graph.
        example_inputs: its inputs in the first call.
        options: see ``Options``.
        mode: as for torch's default backend.
    """
    skip_our_frames()  # for modules that were imported after fully_shard
    try:
        inline_nested_regions(gm)
    except NotImplementedError as error:
        return _raiser(error)
    region = find_region(gm, example_inputs)
    group = region.agreeing_group
    agreement = None if group is None else agreement_of(group)
    if any(len(group.ranks) > 1 for group in region.groups):
        compile_past_limits()
    try:
        parsed = checked_options(options, mode, region, example_inputs)
    except (ValueError, NotImplementedError) as error:
        if agreement is not None:
            agreement.abandon(error)
        return _raiser(error)
    try:
        compiling = stage(f"compiling a graph of {len(region.reads)} parameters")
        with beating(None if agreement is None else agreement.liveness), compiling:
            return Compilation(gm, example_inputs, region, parsed, mode).compile()
    except (RanksDiffer, PlanDoesNotFit, OverBudget, PatternsDiffer, GraphIsWrong) as error:
        return _raiser(error)


def _reset() -> None:
    """Forget everything about compiled code: ``torch._dynamo.reset()`` calls this."""
    COMPILE_LOG.clear()
    forget_breaks()
    RUNTIME.follower.known.forget_codes()


compiled_fsdp.reset = _reset  # type: ignore[attr-defined]


def _raiser(error: Exception) -> Callable[..., Any]:
    """Return code that raises ``error``, after which Dynamo compiles the function anew.

    If the code were kept, an equal model without the mistake would run it, too.
    """
    code = code_being_compiled()

    def fail(*_: Any) -> Any:
        if code is not None:
            forget_code(code)
        # without the traceback of its first raise, through the planner, which tells a user nothing
        raise error.with_traceback(None) from error.__cause__

    return fail
