"""Hooks and running forwards of modules, pytrees, and torch's own composable APIs."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

from compiled_fsdp.compat.dynamo import never_compiled


def hook_forward(module: torch.nn.Module, before: Callable[..., Any], after: Callable[[Any, Any, Any], Any]) -> None:
    """Call ``before`` ahead of all forward pre-hooks of ``module``, and ``after`` at the end of its forward.

    ``before`` gets keyword arguments if it takes them. ``after`` is called even if the forward raises an error. Both
    hooks have a key of their own. Torch would number them in the order of registration, and Dynamo guards on the
    numbers, so the second model of a process would be compiled again.
    """
    key = 1 << 40  # torch's numbers never get that high
    others = dict(module._forward_pre_hooks)
    # Refill the dictionary, because Dynamo of torch 2.11 mixes up hooks after a move_to_end, which
    # register_forward_pre_hook(prepend=True) does.
    module._forward_pre_hooks.clear()
    module._forward_pre_hooks[key] = before
    module._forward_pre_hooks.update(others)
    if len(inspect.signature(before).parameters) > 2:
        module._forward_pre_hooks_with_kwargs[key] = True
    module._forward_hooks[key] = after
    module._forward_hooks_always_called[key] = True


# The code of functions that run a module's forward, and the local variable that holds the module, by the code's id().
# The code itself is no key, because code from Dynamo may have constants that cannot be hashed.
_forward_codes: dict[int, tuple[Any, str]] = {}


def register_forward_caller(function: Any, local: str) -> None:
    """Note that ``function`` runs the forward of the module in its local variable ``local``."""
    _forward_codes[id(function.__code__)] = function.__code__, local


register_forward_caller(torch.nn.Module._call_impl, "self")


def _forward_in(frame: Any) -> Any:
    """Return the module whose forward a frame runs; None for another frame."""
    code, local = _forward_codes.get(id(frame.f_code), (None, ""))
    return frame.f_locals.get(local) if code is not None else None


@never_compiled
def forwards_on_stack(modules: list[torch.nn.Module]) -> int:
    """Return how many forwards of ``modules`` are running in this thread."""
    frame = sys._getframe(1)
    count = 0
    while frame is not None:
        running = _forward_in(frame)
        count += running is not None and any(running is module for module in modules)
        frame = frame.f_back  # type: ignore[assignment]
    return count


def running_forwards() -> Iterator[torch.nn.Module]:
    """Yield the modules whose forwards are running in this thread, the innermost first, a module perhaps twice.

    From torch 2.15 on, Dynamo compiles ``_call_impl`` itself for an ``nn.Sequential`` that is compiled alone. Then only
    the caller of ``_call_impl`` is on the stack.
    """
    frame, caller = sys._getframe(1), torch.nn.Module._wrapped_call_impl.__code__
    while frame is not None:
        running = frame.f_locals.get("self") if frame.f_code is caller else _forward_in(frame)
        if running is not None:
            yield running
        frame = frame.f_back  # type: ignore[assignment]


def innermost_forward() -> torch.nn.Module | None:
    """Return the module whose forward is the innermost one that is running in this thread; None outside of forwards."""
    return next(running_forwards(), None)


def forwards_in_trace() -> Iterator[torch.nn.Module]:
    """While Dynamo traces: yield the modules whose forwards the traced code has entered, the innermost first."""
    from torch._dynamo import symbolic_convert

    root: Any = getattr(symbolic_convert.tls, "current_tx", None)
    frame: Any = None if root is None else root.output.current_tx
    while frame is not None:
        # a module that Dynamo has not looked at yet has no forward in the trace
        module = getattr(frame.symbolic_locals.get("self"), "value", None)
        if isinstance(module, torch.nn.Module) and frame.f_code.co_name == "forward":
            yield module
        frame = getattr(frame, "parent", None)


@functools.cache
def torchs_fsdp2() -> Any:
    """Return the module that defines FSDP2. ``install`` may have replaced the names in ``torch.distributed.fsdp``."""
    from torch.distributed.fsdp._fully_shard import _fully_shard

    return _fully_shard


@functools.cache
def torchs_replicate() -> Any:
    """Return torch's ``replicate`` of FSDP2. Call this before ``install`` replaces the name where it is defined."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate


@functools.cache
def _torchs_fully_shard() -> Any:
    return torchs_fsdp2().fully_shard


def register_torch_forward_methods() -> None:
    """Note that methods registered with torch's ``register_fsdp_forward_method`` run forwards.

    Call this before anybody replaces a name in torch, because torch's own ``fully_shard`` is looked up here once and
    kept.
    """
    _torchs_fully_shard()
    for code in torchs_fsdp2().register_fsdp_forward_method.__code__.co_consts:
        if isinstance(code, types.CodeType) and code.co_varnames[:1] == ("self",):
            _forward_codes[id(code)] = code, "self"


def torch_fsdp_type() -> tuple[type, ...]:
    """Return FSDP2's module class in a tuple; an empty tuple if FSDP2 was never imported.

    Importing FSDP2 takes half a second.
    """
    return (torchs_fsdp2().FSDPModule,) if "torch.distributed.fsdp" in sys.modules else ()


def torch_fsdp_in_forward(tensors: list[Any]) -> str | None:
    """Return the class name of an FSDP2 module whose forward is running and has parameters among ``tensors``, or None.

    FSDP2's state alone is not enough, because it says "forward" for ever after a forward that raised an error.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return None
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    among = {id(tensor) for tensor in tensors}
    for module, reference in list(_module_state_mapping.items()):
        state = reference()
        running = isinstance(state, FSDPState) and state._training_state == TrainingState.FORWARD
        if running and any(id(parameter) in among for parameter in module.parameters()):
            return type(module).__name__
    return None


def composable_state_of(module: torch.nn.Module) -> str | None:
    """Return the name of the composable API of torch that was applied to ``module``; None if none was."""
    from torch.distributed._composable.contract import REGISTRY_KEY

    # the module's own registry: wrappers pass on the attributes of the module inside
    registry = module.__dict__.get(REGISTRY_KEY, ())
    return next((api for api in registry if api in ("replicate", "fully_shard")), None)


def is_wrap_policy(policy: Any) -> bool:
    """Whether ``policy`` is one of FSDP1's policy objects (``ModuleWrapPolicy`` and the like), not a mere callable."""
    from torch.distributed.fsdp.wrap import _Policy

    return isinstance(policy, _Policy)


def chosen_by_wrap_policy(
    root: torch.nn.Module,
    policy: Any,
    ignored_modules: set[torch.nn.Module],
    ignored_params: set[Any],
    arguments: dict[str, Any],
) -> dict[torch.nn.Module, dict[str, Any]]:
    """Return the modules inside of ``root`` that FSDP1 would wrap, each with its arguments.

    They are in FSDP1's order: inner modules come first.
    """
    from torch.distributed.fsdp.wrap import _post_order_apply, _recursive_wrap

    chosen: dict[torch.nn.Module, dict[str, Any]] = {}
    if is_wrap_policy(policy):
        targets = policy._run_policy(root, ignored_modules, dict(arguments))

        def add(module: torch.nn.Module) -> None:
            if module in targets and module is not root:
                chosen[module] = targets[module]

        _post_order_apply(root, add)
        return chosen

    def wrapped(module: torch.nn.Module, **own: Any) -> torch.nn.Module:
        chosen[module] = {**arguments, **own}
        return module  # torch puts it back in its place

    _recursive_wrap(root, policy, wrapped, ignored_modules, ignored_params, only_wrap_children=True)
    return chosen


def set_fsdp2_state(module: torch.nn.Module, state: Any) -> None:
    """Set the state that torch's ``fully_shard.state(module)`` returns.

    ``module`` is also registered with torch as a module that ``fully_shard`` was applied to.
    """
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem

    fully_shard = _torchs_fully_shard()
    module.__dict__.setdefault(STATE_KEY, {})[fully_shard.__wrapped__] = state
    module.__dict__.setdefault(REGISTRY_KEY, {})[fully_shard.__name__] = RegistryItem()


def fsdp2_state(module: torch.nn.Module) -> Any:
    """Return the result of torch's ``fully_shard.state(module)``.

    It is a state if torch's FSDP2 has sharded the module, or if ``set_fsdp2_state`` was called with it; otherwise None.
    """
    return _torchs_fully_shard().state(module)


def replicate_state(module: torch.nn.Module) -> Any:
    """Return the result of torch's ``replicate.state(module)``: a state if torch's ``replicate`` was applied to it."""
    return torchs_replicate().state(module)


def has_spmd_types(param: torch.Tensor) -> bool:
    """Whether the package ``spmd_types`` has a type for a parameter. FSDP2 keeps such types from torch 2.15 on."""
    is_available = getattr(torch.distributed, "_is_spmd_types_available", None)
    if is_available is None or not is_available():
        return False
    return bool(importlib.import_module("spmd_types").get_local_type(param))


def fsdp2_comm_context() -> Any:
    """Return FSDP2's streams, for a state that may share them with torch's own states.

    The streams are made when one of torch's own states first runs.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext

    return FSDPCommContext()


def fake_store() -> Any:
    """Return the store of a process group of ranks that do not exist, and register the group's backend "fake"."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def apply_to_tensors(function: Callable[[torch.Tensor], Any], container: Any) -> Any:
    """Return ``container`` with ``function`` applied to the tensors in it, as FSDP2 casts.

    Unlike in pytrees, dataclasses are containers.
    """
    from torch.distributed.utils import _apply_to_tensors

    return _apply_to_tensors(function, container)
