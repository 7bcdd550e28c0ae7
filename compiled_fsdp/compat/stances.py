"""The stance of torch.compile with which one rank alone would run uncompiled."""

# Why: docs/design.md, note N35

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from compiled_fsdp.compat.dynamo import is_compiler


@functools.cache
def compile_past_stance(backend: Callable[..., Any]) -> None:
    """Let Dynamo compile what ``backend`` compiles from now on where ``eager_on_recompile`` says to run it uncompiled.

    Torch asks nobody: with that stance it turns compiling off. So its reading of the stance is replaced.
    """
    from torch._dynamo import eval_frame
    from torch._dynamo.eval_frame import _callback_from_stance

    @functools.wraps(_callback_from_stance)
    def chosen(callback: Any) -> Any:
        by_stance = _callback_from_stance(callback)
        # False: run compiled code where there is some, and compile nothing
        if by_stance is False and callable(callback) and _compiles_with(callback, backend):
            return callback
        return by_stance

    setattr(eval_frame, _callback_from_stance.__name__, chosen)


def _compiles_with(callback: Any, backend: Callable[..., Any]) -> bool:
    """Whether what Dynamo calls for a frame has this backend, or a function that has called it, at the end."""
    while callback is not None:
        if is_compiler(callback, backend):
            return True
        callback = getattr(callback, "_torchdynamo_orig_backend", None)
    return False


def stance_is_eager_on_recompile() -> bool:
    """Whether ``torch.compiler.set_stance`` says to compile nothing more."""
    from torch._dynamo import eval_frame

    return bool(eval_frame._stance.stance == "eager_on_recompile")
