"""What a call of compiled code runs: by torch.compile's stance, and under a ``FakeTensorMode``."""

# Why: docs/design.md, note N35

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from compiled_fsdp.compat.dynamo import is_compiler
from compiled_fsdp.compat.graphs import fake_mode_is_active

F = TypeVar("F", bound=Callable[..., Any])


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


def uncompiled_in_fake_mode(backend: F) -> F:
    """A decorator of a backend: what it compiles runs uncompiled while a ``FakeTensorMode`` is active.

    Under any other dispatch mode Dynamo does so by itself. Under this one it would compile for fake tensors, and keep
    that code.
    """
    from torch._dynamo import eval_frame
    from torch._dynamo.eval_frame import _callback_from_stance

    # With fullgraph=True torch 2.13 counts compiled frames and raises if there were none; at -1 it does not count.
    set_count = getattr(eval_frame, "set_fullgraph_compiled_frame_count", None)

    @functools.wraps(_callback_from_stance)
    def chosen(callback: Any) -> Any:
        if not (fake_mode_is_active() and _compiles_with(callback, backend)):
            return _callback_from_stance(callback)
        if set_count is not None:
            set_count(-1)
        return None

    setattr(eval_frame, _callback_from_stance.__name__, chosen)
    return backend


def _compiles_with(callback: Any, backend: Callable[..., Any]) -> bool:
    """Whether what Dynamo calls for a frame has this backend, or a function that has called it, at the end."""
    while callable(callback):
        if is_compiler(callback, backend):
            return True
        callback = getattr(callback, "_torchdynamo_orig_backend", None)
    return False


def stance_is_eager_on_recompile() -> bool:
    """Whether ``torch.compiler.set_stance`` says to compile nothing more."""
    from torch._dynamo import eval_frame

    return bool(eval_frame._stance.stance == "eager_on_recompile")
