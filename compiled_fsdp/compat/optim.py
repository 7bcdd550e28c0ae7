"""The parts of ``torch.optim`` that have no public name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim._muon import _adjust_lr as adjusted_lr
from torch.optim._muon import _zeropower_via_newtonschulz as newton_schulz
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.optim.optimizer import _to_scalar as scalar
from torch.overrides import TorchFunctionMode

__all__ = [
    "adjusted_lr",
    "compile_update",
    "create_state",
    "foreach_norm",
    "has_hooks",
    "newton_schulz",
    "scalar",
    "step_with_hooks",
    "step_without_hooks",
    "trace_update",
]


def foreach_norm(tensors: list[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """The norm of each tensor."""
    return list(torch._foreach_norm(tensors, norm_type))


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Call ``optimizer.step()``, but not the hooks around it: it is part of another optimizer's step."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def step_with_hooks(optimizer: torch.optim.Optimizer, update: Callable[[], None]) -> None:
    """Call ``update`` in the place of the code of ``optimizer.step()``, with the hooks around it."""
    optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask whether ``step`` was called
    optimizer.profile_hook_step(lambda _: update())(optimizer)


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks run around this optimizer's steps, or behind the steps of all optimizers."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_post_hooks)


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of parameters that have a gradient and no state yet, as the beginning of a step does.

    Some optimizers create a part of it only at the end of a step, for example SGD its momentum.
    """
    import inspect

    init: Any = optimizer._init_group  # type: ignore[attr-defined]
    lists = len(inspect.signature(init).parameters) - 1
    for group in optimizer.param_groups:
        init(group, *([] for _ in range(lists)))


# ---- an optimizer's step as a graph ----------------------------------------------------------------------------------
class _AsDynamo(TorchFunctionMode):
    """Takes those operations of an optimizer apart that Dynamo takes apart, so that the numbers are the same."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch._dynamo import polyfills

        if func is torch._foreach_lerp_ and not isinstance(args[2], (list, tuple)):
            return polyfills.foreach_lerp_inplace(*args)
        if func is torch._foreach_pow and isinstance(args[0], torch.Tensor):
            return polyfills.foreach_pow_scalar(*args)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Let ``torch.compiler.is_compiling()`` be true: then an optimizer computes with its step counts as tensors."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def trace_update(update: Callable[..., Iterable[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """Trace ``update``, a function that steps an optimizer, with fake tensors in the place of ``inputs``.

    Returns: a graph that writes to its inputs as ``update`` does, and returns a tuple of tensors.
    """
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.graph import CodeGen

    with torch.no_grad(), _compiling(), _AsDynamo():
        gm = make_fx(lambda *given: tuple(update(*given)), tracing_mode="fake")(*inputs)
    gm.graph.set_codegen(CodeGen())  # instead of one that flattens the inputs in each call
    gm.recompile()
    return gm


def compile_update(
    gm: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile a graph of ``trace_update`` with Inductor. ``options`` are Inductor's own."""
    from torch._inductor.compile_fx import compile_fx

    with torch.no_grad():
        code: Any = compile_fx(gm, list(inputs), config_patches=dict(options))
    return code
