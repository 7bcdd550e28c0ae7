"""``FSDPModule``: what FSDP2's methods on a sharded module do here.

Those about gradients are in ``gradient_methods.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch.distributed.fsdp
from torch import nn
from torch.distributed.fsdp import UnshardHandle
from torch.utils.hooks import RemovableHandle

from compiled_fsdp.compat.modules import register_forward_caller, torch_fsdp_type, torchs_fsdp2
from compiled_fsdp.frontend.forward_hooks import ForwardHooks, close
from compiled_fsdp.frontend.gradient_methods import GradientMethods, units_of
from compiled_fsdp.frontend.pipelining import FSDP2State
from compiled_fsdp.frontend.unshard import unshard
from compiled_fsdp.frontend.unused import use_all, use_what_is_read
from compiled_fsdp.runtime.accumulation import forget_accumulated
from compiled_fsdp.runtime.context import RUNTIME
from compiled_fsdp.state.prefetch_lists import BACKWARD, FORWARD
from compiled_fsdp.state.unit import Unit

if TYPE_CHECKING:
    _MixedInto = nn.Module  # so that what fully_shard returns can be called, and has parameters()
else:
    _MixedInto = object


class FSDPModule(GradientMethods, torch.distributed.fsdp.FSDPModule, _MixedInto):
    """Mixed into the class of every module that ``fully_shard`` was called on; FSDP2's methods.

    It is one of FSDP2's for ``isinstance``, which pipeline schedules and trainers ask; no method is inherited from it.
    """

    _fsdp_unit: Unit
    _fsdp_hooks: ForwardHooks
    _fsdp2_state: FSDP2State
    # where FSDP2's own code finds the original class: after the new one, this one and its two bases
    _orig_cls_mro_index = 4

    def reshard(self) -> None:
        """Undo ``unshard()``: drop the full parameters of this unit (not of those inside)."""
        self._fsdp_unit.put_back()
        self._fsdp_unit.forget_reads()
        self._fsdp_unit.reshard()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this unit (not of those inside), a collective call.

        Until it is resharded they read as full tensors, outside of forward too, and forwards read this one copy. The
        unit is resharded by ``reshard()``, by the end of its forward if it reshards after forward, else by its
        backward, and before ``state_dict()`` and loading.

        Args:
            async_op: only start; the result's ``wait()`` finishes. An eager forward waits by itself; a compiled one
                does not know of what is still in flight and gathers again.
        """
        unsharding = unshard(self._fsdp_unit)
        if async_op:
            return unsharding
        unsharding.wait()
        return None

    def register_post_backward_hook(self, hook: Callable[[list[nn.Parameter]], None]) -> RemovableHandle:
        """Call ``hook(params)`` in backward when a bucket of gradients is reduced.

        ``params`` are the sharded parameters of this module whose ``.grad`` the bucket brought, in the order in which
        their gradients were accumulated. A ``foreach`` optimizer can step them together, and set their gradients to
        None.

        It is called after their post-accumulate-grad hooks. Each parameter is in one call a backward. Where a whole
        graph returns all gradients at once (``torch.compile`` without graph breaks and without ``compiled_autograd``),
        there is one call.

        Returns: a handle whose ``remove()`` takes the hook away.
        """
        units = units_of(self)
        handle = RemovableHandle(
            units[0].post_backward_hooks, extra_dict=[unit.post_backward_hooks for unit in units[1:]]
        )
        for unit in units:
            unit.post_backward_hooks[handle.id] = hook
        return handle

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change ``reshard_after_forward`` for this unit (and those inside).

        The next forward compiles again, once.

        Raises:
            ValueError: not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for unit in units_of(self, recurse=recurse):
            unit.policy.reshard_after_forward = reshard_after_forward
            # all ranks gather in backward, or none
            unit.policy.post_forward_group, unit.post_forward_world_size = None, 0
            unit.apply_reshard()

    def set_modules_to_forward_prefetch(self, modules: Iterable[Any]) -> None:
        """Ask for gathers ahead: where this unit's forward begins, those of ``modules`` go out too, in this order.

        With ``bucket="module"`` or ``"none"`` the compiled graph is in that order, instead of one unit ahead. The
        planner (``bucket="auto"``) simulates it beside its own plans and takes it if it is quicker; without a memory
        budget it may hold as much as that order does. A list of k units in front of this one is k units ahead.

        It counts inside one graph: not for buckets by size or by names, not without ``overlap``, nor from one graph of
        a broken forward to the next or uncompiled, where one set is in flight ahead. A unit without parameters of its
        own has no place in a graph, and its lists do nothing. All ranks need the same lists. The next forward compiles
        again, once.

        Args:
            modules: units, in the order of their launches; empty for the default. Each call replaces the list.

        Raises:
            ValueError: one of them is not sharded.
        """
        self._fsdp_unit.prefetch_lists.set(FORWARD, self._fsdp_unit.key, _unit_keys(modules))

    def set_modules_to_backward_prefetch(self, modules: Iterable[Any]) -> None:
        """As ``set_modules_to_forward_prefetch``, for backward.

        The gathers of the unit that backward needs next go out as well, whether the list names it or not; FSDP2 leaves
        that to the list. A unit that is kept from forward to backward begins where the first of its gradients is
        complete.
        """
        self._fsdp_unit.prefetch_lists.set(BACKWARD, self._fsdp_unit.key, _unit_keys(modules))

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Whether parameters that a forward did not use get zero gradients, which are reduced with the others'.

        For ranks that use different parameters of a unit, or the same in another order. A unit with it gathers all of
        its trainable parameters in forward, in evaluation too, and in backward. (FSDP2 has it from torch 2.13.)
        """
        for unit in units_of(self, recurse=recurse):
            for module in unit.modules:
                use_all(module, unit) if reduce_scatter_unused_params else use_what_is_read(module)

    def reset_iter_state(self) -> None:
        """Close the units of this module as after a forward and a backward.

        An exception needs no call: units close themselves. ``unshard()``ed parameters are sharded again, and gradients
        that wait for a backward that communicates are dropped. What a failed backward has accumulated in ``.grad``
        stays; call ``zero_grad()``.
        """
        for unit in units_of(self):
            close(unit)
        RUNTIME.reset()
        forget_accumulated(units_of(self))

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted: it says from which stream FSDP2 allocates gathers, which is the compiler's to do here."""

    def _get_fsdp_state(self) -> Any:
        """For torch's own functions and other libraries: what stands for FSDP2's state."""
        return self._fsdp2_state


def _unit_keys(modules: Iterable[Any]) -> list[int | None]:
    listed = list(modules)
    for module in listed:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
    return [module._fsdp_unit.key for module in listed]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method of a unit read its parameters in full, as its forward does.

    Its inputs and outputs are cast as there. It does nothing if ``module`` is not sharded, and is torch's own function
    if torch's FSDP2 sharded it. (Torch's function serves for ours, too.)

    Raises:
        ValueError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        torchs_fsdp2().register_fsdp_forward_method(module, method_name)
        return
    inner = getattr(module, method_name, None)
    if not callable(inner):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    hooks = module._fsdp_hooks

    @functools.wraps(inner)
    def method(*args: Any, **kwargs: Any) -> Any:
        output = None
        try:
            args, kwargs = hooks.begin(module, args, kwargs)
            output = inner(*args, **kwargs)
        finally:
            output = hooks.end(module, args, output)
        return output

    register_forward_caller(method, "module")
    setattr(module, method_name, method)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Accepted, and nothing is done: FSDP2's models share streams by it.

    Ours have no streams of their own: collectives run in the process group's. Modules that torch's FSDP2 sharded share
    theirs.

    Raises:
        ValueError: one of them is not sharded.
    """
    for module in modules:
        if not isinstance(module, torch_fsdp_type()):
            raise ValueError(f"share_comm_ctx: expects modules that fully_shard was called on, but got {type(module)}")
    torchs_fsdp2().share_comm_ctx([module for module in modules if not isinstance(module, FSDPModule)])
