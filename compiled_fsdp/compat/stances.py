"""Whether a call runs compiled code, by torch.compile's stance and under a ``FakeTensorMode``."""

# Why: docs/design/ranks.md, "No rank runs uncompiled at a recompile limit"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compiled_fsdp.compat import patches
from compiled_fsdp.compat.dynamo import is_ours
from compiled_fsdp.compat.graphs import fake_mode_is_active


def watch_stances() -> None:
    """From now on, run code for compiled_fsdp's backend uncompiled while a ``FakeTensorMode`` is active.

    Under any other dispatch mode, Dynamo runs it uncompiled by itself. Under this one, Dynamo would compile it for fake
    tensors, and keep that code.

    Also, once the backend compiles past recompile limits, let Dynamo compile for it although the stance
    ``eager_on_recompile`` says to run uncompiled.
    """
    from torch._dynamo import eval_frame

    # With fullgraph=True, torch 2.13 raises an error if it counts no compiled frame. At -1 it does not count.
    set_count = getattr(eval_frame, "set_fullgraph_compiled_frame_count", None)

    def replacement(by_torch: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(callback: Any) -> Any:
            by_stance = by_torch(callback)
            if fake_mode_is_active() and _compiles_for_us(callback):
                if set_count is not None:
                    set_count(-1)
                return None
            # False: run compiled code if there is some, and compile nothing
            past_limits = by_stance is False and callable(callback) and patches.is_installed(patches.RECOMPILE_LIMIT)
            return callback if past_limits and _compiles_for_us(callback) else by_stance

        return chosen

    patches.install(patches.STANCE, replacement)


def _compiles_for_us(callback: Any) -> bool:
    """Whether Dynamo's callback for a frame ends in compiled_fsdp's backend, or in a function that has called it."""
    while callable(callback):
        if is_ours(callback):
            return True
        callback = getattr(callback, "_torchdynamo_orig_backend", None)
    return False


def stance_is_eager_on_recompile() -> bool:
    """Whether ``torch.compiler.set_stance`` says to compile nothing more (``eager_on_recompile``)."""
    from torch._dynamo import eval_frame

    return bool(eval_frame._stance.stance == "eager_on_recompile")
