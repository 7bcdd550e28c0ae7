"""Modules, the containers that go through them, and what torch's own composable APIs do with them."""

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
    """Call ``before`` ahead of all forward pre-hooks of ``module`` (with keywords, if it takes them), and ``after``
    when its forward has ended, by an error too.

    Under a key of our own: torch numbers hooks in the order of registration, Dynamo guards on the numbers, and so the
    second model of a process would be compiled again.
    """
    key = 1 << 40  # no number of torch's gets that far
    others = dict(module._forward_pre_hooks)
    # inserted anew: Dynamo of torch 2.11 mixes up hooks after a move_to_end, as register_forward_pre_hook(prepend=True)
    # does it
    module._forward_pre_hooks.clear()
    module._forward_pre_hooks[key] = before
    module._forward_pre_hooks.update(others)
    if len(inspect.signature(before).parameters) > 2:
        module._forward_pre_hooks_with_kwargs[key] = True
    module._forward_hooks[key] = after
    module._forward_hooks_always_called[key] = True


# The code of functions that run a module's forward, and the local variable that holds the module. By id(): code that
# Dynamo made may have constants that cannot be hashed, and then cannot be hashed itself.
_forward_codes: dict[int, tuple[Any, str]] = {}


def register_forward_caller(function: Any, local: str) -> None:
    """Note that ``function`` runs a forward of the module that its variable ``local`` holds."""
    _forward_codes[id(function.__code__)] = function.__code__, local


register_forward_caller(torch.nn.Module._call_impl, "self")


def _forward_in(frame: Any) -> Any:
    """The module whose forward a frame runs, if it does."""
    code, local = _forward_codes.get(id(frame.f_code), (None, ""))
    return frame.f_locals.get(local) if code is not None else None


@never_compiled
def forwards_on_stack(modules: list[torch.nn.Module]) -> int:
    """How many forwards of any of ``modules`` are running in this thread."""
    frame = sys._getframe(1)
    count = 0
    while frame is not None:
        running = _forward_in(frame)
        count += running is not None and any(running is module for module in modules)
        frame = frame.f_back  # type: ignore[assignment]
    return count


def running_forwards() -> Iterator[torch.nn.Module]:
    """The modules whose forwards are running in this thread, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        if (running := _forward_in(frame)) is not None:
            yield running
        frame = frame.f_back  # type: ignore[assignment]


def innermost_forward() -> torch.nn.Module | None:
    """The module whose forward is the innermost one that is running in this thread."""
    return next(running_forwards(), None)


def forwards_in_trace() -> Iterator[torch.nn.Module]:
    """While Dynamo traces: the modules whose forwards the traced code has entered, the innermost first."""
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
    """The module that defines FSDP2. In ``torch.distributed.fsdp`` its names may have been replaced by ours."""
    from torch.distributed.fsdp._fully_shard import _fully_shard

    return _fully_shard


@functools.cache
def _torchs_fully_shard() -> Any:
    return torchs_fsdp2().fully_shard


def register_torch_forward_methods() -> None:
    """Note that methods registered with torch's ``register_fsdp_forward_method`` run forwards.

    To be called before anybody replaces a name in torch: torch's own function is kept from then on.
    """
    _torchs_fully_shard()
    for code in torchs_fsdp2().register_fsdp_forward_method.__code__.co_consts:
        if isinstance(code, types.CodeType) and code.co_varnames[:1] == ("self",):
            _forward_codes[id(code)] = code, "self"


def torch_fsdp_type() -> tuple[type, ...]:
    """FSDP2's module class, or nothing where FSDP2 was never imported (importing it takes half a second)."""
    return (torchs_fsdp2().FSDPModule,) if "torch.distributed.fsdp" in sys.modules else ()


def torch_fsdp_in_forward(tensors: list[Any]) -> str | None:
    """The class name of a module of torch's FSDP2 whose forward is running on ``tensors``; None where there is none.

    Its state alone does not tell: it says "forward" for ever after one that raised.
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
    """The name of a composable API of torch's that was applied to ``module``; None if none was."""
    from torch.distributed._composable.contract import REGISTRY_KEY

    # the module's own: wrappers pass on the attributes of the module inside
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
    """The modules that FSDP1 would wrap inside of ``root``, in its order, inner ones first, each with its arguments."""
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
        return module  # torch puts it back where it was

    _recursive_wrap(root, policy, wrapped, ignored_modules, ignored_params, only_wrap_children=True)
    return chosen


def set_fsdp2_state(module: torch.nn.Module, state: Any) -> None:
    """Set what ``fully_shard.state(module)`` of torch returns, and register ``module`` as one that ``fully_shard`` was
    applied to."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem

    fully_shard = _torchs_fully_shard()
    module.__dict__.setdefault(STATE_KEY, {})[fully_shard.__wrapped__] = state
    module.__dict__.setdefault(REGISTRY_KEY, {})[fully_shard.__name__] = RegistryItem()


def fsdp2_state(module: torch.nn.Module) -> Any:
    """What ``fully_shard.state(module)`` of torch returns: a state for a module that torch's FSDP2 sharded or that
    ``set_fsdp2_state`` was called with, else None."""
    return _torchs_fully_shard().state(module)


def has_spmd_types(param: torch.Tensor) -> bool:
    """Whether the package ``spmd_types`` says something of a parameter, which FSDP2 keeps from torch 2.15 on."""
    is_available = getattr(torch.distributed, "_is_spmd_types_available", None)
    if is_available is None or not is_available():
        return False
    return bool(importlib.import_module("spmd_types").get_local_type(param))


def fsdp2_comm_context() -> Any:
    """FSDP2's streams, for a state that may share them with torch's own states. They are made when one of those first
    runs."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext

    return FSDPCommContext()


def fake_store() -> Any:
    """The store of a process group of the backend "fake", which is registered by this: its ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def apply_to_tensors(function: Callable[[torch.Tensor], Any], container: Any) -> Any:
    """``container`` with ``function`` applied to the tensors in it, as FSDP2 casts. Unlike in pytrees, dataclasses are
    containers."""
    from torch.distributed.utils import _apply_to_tensors

    return _apply_to_tensors(function, container)
