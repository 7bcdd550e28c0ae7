"""`backward(retain_graph=True)` of code that was compiled before it was known."""

# Why: docs/design.md, note N62

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
    """While it lasts, AOTAutograd makes functions whose graphs may be retained.

    Inductor writes to saved tensors that nobody reads later ("donated buffers"), so AOTAutograd refuses to run such a
    backward in a graph that is retained, unless it is compiled for that: in the first backward. Ours is compiled with
    the forward, and gets copies of those tensors then.
    """

    # torch's finishes what is compiled, and what comes from the cache
    def replacement(finish: Callable[..., Any]) -> Callable[..., Any]:
        def post_compile(*args: Any, **kwargs: Any) -> Any:
            if not kwargs:
                (spec,) = args
                backward, metadata = _retaining(spec.compiled_bw_func, spec.fw_metadata)
                return finish(dataclasses.replace(spec, compiled_bw_func=backward, fw_metadata=metadata))
            forward, backward, *rest = args  # before torch 2.13
            backward, kwargs["fw_metadata"] = _retaining(backward, kwargs["fw_metadata"])
            return finish(forward, backward, *rest, **kwargs)

        return post_compile

    with patches.installed(patches.KEPT_GRAPHS, replacement):
        yield


def _retaining(backward: Callable[..., Any] | None, metadata: Any) -> tuple[Callable[..., Any] | None, Any]:
    """The backward that copies what it is not to write to, and metadata by which it may be retained."""
    if backward is None:
        return backward, metadata
    donated: Sequence[int] = metadata.bw_donated_idxs or ()
    metadata = copy.copy(metadata)  # the cache keeps the other
    metadata.bw_donated_idxs = []
    return _with_copies(backward, donated) if donated else backward, metadata


def _with_copies(backward: Callable[..., Any], donated: Sequence[int]) -> Callable[..., Any]:
    from torch._prims_common import clone_preserve_strides

    def run(args: list[Any]) -> Any:
        if keeps_graph():
            for i in donated:
                args[i] = clone_preserve_strides(args[i])  # a chunk's stay those that the code asserts
        return backward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
