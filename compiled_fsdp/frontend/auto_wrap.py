"""Units by policy: FSDP1's ``auto_wrap_policy`` chooses the modules inside of a root that become units of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from compiled_fsdp.compat.modules import chosen_by_wrap_policy, is_wrap_policy
from compiled_fsdp.frontend.fsdp_module import FSDPModule

Arguments = dict[str, Any]


def units_by_policy(module: Any, policy: Any, arguments: Arguments) -> list[tuple[nn.Module, Arguments]]:
    """The modules to shard, inner ones before those around them, each with ``fully_shard``'s arguments.

    They are the modules inside of ``module`` that FSDP1 would wrap, and ``module`` as the last one. Modules that are
    sharded already stay as they are: the policy is not asked about them, and their parameters do not count. A module
    that is in two places becomes one unit.

    Args:
        module: the root.
        policy: one of ``torch.distributed.fsdp.wrap``, or a callable ``(module, recurse, nonwrapped_numel)``.
        arguments: ``fully_shard``'s keyword arguments for the root, and for all units to which the policy gives no
            others.

    Raises:
        ValueError: ``module`` is a list, ``policy`` is not a policy, or it gives an argument that ``fully_shard`` does
            not have.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(
            "fully_shard: auto_wrap_policy chooses units inside of one module, but module is a "
            f"{type(module).__name__}; give it the root, or call fully_shard on the list without a policy, and then on "
            "the root with it."
        )
    _check_policy(module, policy)
    sharded = [inner for unit in module.modules() if isinstance(unit, FSDPModule) for inner in unit.modules()]
    ignored = {*(arguments["ignored_params"] or ()), *(param for inner in sharded for param in inner.parameters())}
    chosen = chosen_by_wrap_policy(module, policy, set(sharded), ignored, arguments)
    names = {inner: name for name, inner in module.named_modules()}
    for unit, own in chosen.items():
        unknown = [name for name in own if name not in arguments]
        if unknown:
            raise ValueError(
                f"fully_shard: auto_wrap_policy gives {names[unit]!r} the argument {unknown[0]!r}, which fully_shard "
                f"does not have; it takes {', '.join(arguments)}."
            )
    return [*chosen.items(), (module, arguments)]


def _check_policy(module: nn.Module, policy: Any) -> None:
    if is_wrap_policy(policy):
        return
    if not callable(policy):
        raise ValueError(
            "fully_shard: auto_wrap_policy should be a policy of torch.distributed.fsdp.wrap, such as "
            "ModuleWrapPolicy({Block}), or a callable (module, recurse, nonwrapped_numel) -> bool, but got "
            f"{type(policy).__name__}."
        )
    if (problem := _problem_with_a_call(policy, module)) is not None:
        name = getattr(policy, "__name__", type(policy).__name__)
        raise ValueError(
            f"fully_shard: auto_wrap_policy is called with module, recurse and nonwrapped_numel, but {name} does not "
            f"take them: {problem}. If it has further arguments, use functools.partial; if it is a class, pass an "
            "instance."
        )


def _problem_with_a_call(policy: Callable[..., Any], module: nn.Module) -> str | None:
    try:
        signature = inspect.signature(policy)
    except ValueError:  # some functions that are not written in Python have no signature
        return None
    try:
        signature.bind(module=module, recurse=True, nonwrapped_numel=0)
    except TypeError as error:
        return str(error)
    return None
