"""Guards on what leads to a graph break inside of a call, which Dynamo forgets."""

# Why: docs/design.md, note N61

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from compiled_fsdp.compat.dynamo import is_compiler

F = TypeVar("F", bound=Callable[..., Any])

_PLAIN = frozenset({"BOOL_MATCH", "CONSTANT_MATCH", "EQUALS_MATCH", "HASATTR", "NONE_MATCH"})
"""Guards of plain values: of others (tensors, symbolic sizes) Dynamo has no record once it begins anew."""


def guards_breaks(backend: F) -> F:
    """A decorator of a backend: guard a graph that ends before a call on why the call could not be traced.

    Dynamo traces into a call, comes to something that it cannot trace, and begins anew, to end the graph before the
    call. What it looked at in there is guarded on no more: code for a layer that prints in this step is taken in steps
    in which it does not, for the sizes that it was compiled for. From now on it is, in what is compiled with
    ``backend`` where there are several ranks. The first break comes before the first graph: hence a decorator.
    """
    from torch._dynamo.symbolic_convert import SpeculationEntry, tls

    fail: Any = SpeculationEntry.fail_and_restart_analysis
    failed: Any = SpeculationEntry.failed

    @functools.wraps(fail)
    def watched_fail(entry: Any, *args: Any, **kwargs: Any) -> None:
        tx = getattr(tls, "current_tx", None)
        if tx is not None and _several_ranks() and is_compiler(tx.output.compiler_fn, backend):
            entry.compiled_fsdp_guards = [
                guard
                for guard in tx.output.guards
                if guard.create_fn_name() in _PLAIN and _is_plain(guard.originating_source)
            ]
        fail(entry, *args, **kwargs)

    @functools.wraps(failed)
    def watched_failed(entry: Any, tx: Any) -> bool:
        has_failed: bool = failed(entry, tx)
        if has_failed:
            for guard in getattr(entry, "compiled_fsdp_guards", ()):  # each time that Dynamo begins anew
                tx.output.guards.add(guard)
        return has_failed

    SpeculationEntry.fail_and_restart_analysis = watched_fail  # type: ignore[assignment, method-assign]
    SpeculationEntry.failed = watched_failed  # type: ignore[assignment, method-assign]
    return backend


def _is_plain(source: Any) -> bool:
    """Whether a value is reached from an argument by names and constant keys: then a guard can find it."""
    from torch._dynamo.source import AttrSource, DictGetItemSource, LocalSource, NNModuleSource

    while not isinstance(source, LocalSource):
        if isinstance(source, DictGetItemSource) and not isinstance(source.index, str | int):
            return False
        if not isinstance(source, AttrSource | DictGetItemSource | NNModuleSource):
            return False
        source = source.base
    return True


def _several_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1
