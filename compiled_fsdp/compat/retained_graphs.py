"""``backward(retain_graph=True)`` for backwards that are compiled together with their forward."""

# Why: docs/design/memory.md, "retain_graph=True copies donated buffers"

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from compiled_fsdp.compat import patches
from compiled_fsdp.compat.autograd import keeps_graph


@contextlib.contextmanager
def retains_graphs() -> Iterator[None]:
    """In this context, AOTAutograd makes functions whose backward may run with ``retain_graph=True``.

    Inductor lets a backward write to saved tensors that nobody reads later ("donated buffers"). AOTAutograd refuses to
    run such a backward in a graph that is retained. Torch's own backends compile the backward when it first runs, and
    know then whether the graph is retained. compiled_fsdp compiles the backward together with the forward, so here the
    backward copies the donated tensors whenever the graph is retained.
    """

    # Torch calls ``post_compile`` both for newly compiled code and for code from its cache.
    def replacement(finish: Callable[..., Any]) -> Callable[..., Any]:
        def post_compile(*args: Any, **kwargs: Any) -> Any:
            if not kwargs:
                (spec,) = args
                backward, metadata = _retaining(spec.compiled_bw_func, spec.fw_metadata)
                return finish(dataclasses.replace(spec, compiled_bw_func=backward, fw_metadata=metadata))
            forward, backward, *rest = args  # torch before 2.13
            backward, kwargs["fw_metadata"] = _retaining(backward, kwargs["fw_metadata"])
            return finish(forward, backward, *rest, **kwargs)

        return post_compile

    with patches.installed(patches.KEPT_GRAPHS, replacement):
        yield


def _retaining(backward: Callable[..., Any] | None, metadata: Any) -> tuple[Callable[..., Any] | None, Any]:
    """Return a backward that copies its donated inputs first, and metadata that allow ``retain_graph=True``."""
    if backward is None:
        return backward, metadata
    donated: Sequence[int] = metadata.bw_donated_idxs or ()
    metadata = copy.copy(metadata)  # the original belongs to the cache
    metadata.bw_donated_idxs = []
    return _with_copies(backward, donated) if donated else backward, metadata


def _with_copies(backward: Callable[..., Any], donated: Sequence[int]) -> Callable[..., Any]:
    from torch._prims_common import clone_preserve_strides

    def run(args: list[Any]) -> Any:
        if keeps_graph():
            for i in donated:
                # A plain clone of a chunk is contiguous, but the code asserts the strides that the chunk has.
                args[i] = clone_preserve_strides(args[i])
        return backward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
