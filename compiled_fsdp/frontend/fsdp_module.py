"""``FSDPModule``: FSDP2's methods on a sharded module.

The methods about gradients are in ``gradient_methods.py``.
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
    _MixedInto = nn.Module  # for type checkers: the result of fully_shard can be called, and has parameters()
else:
    _MixedInto = object


class FSDPModule(GradientMethods, torch.distributed.fsdp.FSDPModule, _MixedInto):
    """FSDP2's methods, mixed into the class of every module that ``fully_shard`` was called on.

    For ``isinstance``, which pipeline schedules and trainers ask, such a module is also an FSDPModule of FSDP2. No
    method is inherited from FSDP2's class.
    """

    _fsdp_unit: Unit
    _fsdp_hooks: ForwardHooks
    _fsdp2_state: FSDP2State
    # the index in the MRO where FSDP2's own code finds the original class: after the new class, this one and its bases
    _orig_cls_mro_index = 4

    def reshard(self) -> None:
        """Undo ``unshard()``: drop the full parameters of this unit (not of the units inside)."""
        self._fsdp_unit.put_back()
        self._fsdp_unit.forget_reads()
        self._fsdp_unit.reshard()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this unit (not of the units inside). A collective call.

        Until the unit is resharded, its parameters are full tensors, outside of forward too, and forwards read this one
        copy. The unit is resharded by ``reshard()``, by the end of its forward if it reshards after forward, else by
        its backward, and before ``state_dict()`` and loading.

        For example::

            model.unshard()
            print(model.embedding.weight.norm())  # of the full parameter
            model.reshard()

        Args:
            async_op: start the gathers only, and return a handle whose ``wait()`` finishes them. An eager forward waits
                by itself. A compiled forward does not see gathers in flight, and gathers again.
        """
        unsharding = unshard(self._fsdp_unit)
        if async_op:
            return unsharding
        unsharding.wait()
        return None

    def register_post_backward_hook(self, hook: Callable[[list[nn.Parameter]], None]) -> RemovableHandle:
        """Call ``hook(params)`` in backward each time a bucket of gradients is reduced.

        ``params`` are the sharded parameters of this module whose ``.grad`` the bucket has brought, in the order in
        which their gradients were accumulated. For example, the hook can step them with a ``foreach`` optimizer and set
        their gradients to None.

        The hook is called after the post-accumulate-grad hooks of the parameters. Each parameter is in one call per
        backward. If a graph returns all gradients at once (``torch.compile`` without graph breaks and without
        ``compiled_autograd``), there is one call.

        Returns: a handle whose ``remove()`` removes the hook.
        """
        units = units_of(self)
        handle = RemovableHandle(
            units[0].post_backward_hooks, extra_dict=[unit.post_backward_hooks for unit in units[1:]]
        )
        for unit in units:
            unit.post_backward_hooks[handle.id] = hook
        return handle

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change ``reshard_after_forward`` for this unit (and, with ``recurse``, the units inside).

        The next forward is compiled again, once.

        Raises:
            ValueError: it is not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for unit in units_of(self, recurse=recurse):
            unit.policy.reshard_after_forward = reshard_after_forward
            # now all ranks gather in backward, or none; a smaller group (``reshard_after_forward=8``) is dropped
            unit.policy.post_forward_group = None
            unit.apply_reshard()

    def set_modules_to_forward_prefetch(self, modules: Iterable[Any]) -> None:
        """Launch the gathers of ``modules`` when this unit's forward begins, in this order.

        For example, two layers ahead::

            for layer, *ahead in zip(layers, layers[1:], layers[2:]):
                layer.set_modules_to_forward_prefetch(ahead)

        With ``bucket="module"`` or ``"parameter"`` the compiled graph follows this order, not the default of one unit
        ahead. With ``bucket="auto"`` the planner simulates this order beside its own plans and takes it if it is
        faster; without a memory budget, plans may then hold as much memory as this order does.

        The lists have an effect inside of one graph only. They have none on buckets by size or by names, without
        ``overlap``, across a graph break, or in uncompiled code, where one set of parameters is gathered ahead. The
        lists of a unit without parameters of its own do nothing, because it has no place in a graph. All ranks need the
        same lists. The next forward is compiled again, once.

        Args:
            modules: units, in the order of their launches; empty for the default. Each call replaces the list.

        Raises:
            ValueError: one of them is not sharded.
        """
        self._fsdp_unit.prefetch_lists.set(FORWARD, self._fsdp_unit.key, _unit_keys(modules))

    def set_modules_to_backward_prefetch(self, modules: Iterable[Any]) -> None:
        """Launch the gathers of ``modules`` when this unit's backward begins; see ``set_modules_to_forward_prefetch``.

        The gathers of the unit that backward needs next are launched as well, even if the list does not name it; FSDP2
        leaves that to the list. If a unit stays full from forward to backward, its backward begins when the first of
        its gradients is complete.
        """
        self._fsdp_unit.prefetch_lists.set(BACKWARD, self._fsdp_unit.key, _unit_keys(modules))

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Set whether parameters that a forward did not use get zero gradients, which are reduced like all others.

        Turn it on if ranks use different parameters of a unit, or the same ones in another order. For example, rank 0's
        batch has images and rank 1's has none, so that rank 1 skips the image encoder. A unit with this flag gathers
        all of its trainable parameters in forward, in evaluation too, and in backward. (FSDP2 has it from torch 2.13.)
        """
        for unit in units_of(self, recurse=recurse):
            for module in unit.modules:
                use_all(module, unit) if reduce_scatter_unused_params else use_what_is_read(module)

    def reset_iter_state(self) -> None:
        """Bring the units of this module to their state between two training steps.

        It reshards parameters that ``unshard()`` has gathered, and drops the pending gradients of accumulation.
        Gradients that a failed backward has added to ``.grad`` stay; call ``zero_grad()``. After an exception you need
        not call it, because units close themselves.
        """
        for unit in units_of(self):
            close(unit)
        RUNTIME.reset()
        forget_accumulated(units_of(self))

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing. In FSDP2 it chooses the stream that allocates gathers; in compiled_fsdp the compiler does."""

    def _get_fsdp_state(self) -> Any:
        """The stand-in for FSDP2's state, for torch's own functions and other libraries."""
        return self._fsdp2_state


def _unit_keys(modules: Iterable[Any]) -> list[int | None]:
    listed = list(modules)
    for module in listed:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
    return [module._fsdp_unit.key for module in listed]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method of a unit read the unit's parameters in full, as ``forward`` does.

    The method's inputs and outputs are cast like those of ``forward``. If ``module`` is not sharded, nothing happens.
    If torch's FSDP2 sharded it, torch's own function is called. (Torch's function also works for modules that
    compiled_fsdp sharded.)

    For example::

        fully_shard(model)
        register_fsdp_forward_method(model, "generate")
        tokens = model.generate(prompt)

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
    """Let models that torch's FSDP2 sharded share streams; nothing happens to models that compiled_fsdp sharded.

    Those have no streams of their own, because their collectives run in the streams of the process groups.

    Raises:
        ValueError: one of the modules is not sharded.
    """
    for module in modules:
        if not isinstance(module, torch_fsdp_type()):
            raise ValueError(f"share_comm_ctx: expects modules that fully_shard was called on, but got {type(module)}")
    torchs_fsdp2().share_comm_ctx([module for module in modules if not isinstance(module, FSDPModule)])
