"""What changes on a module: its class (``FSDPModule`` for units, a property per parameter for owners) and its ``_parameters``.

One class is made for each (original class, parameter names, unit or not), so equal layers share a class and with it their
compiled graphs. Nothing about layout, mesh or policy is in the class: it is looked up from the instance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, cast

import torch
import torch.distributed.fsdp
from torch import nn
from torch.utils.hooks import RemovableHandle

from compiled_fsdp.compat import never_a_frame_of_its_own, register_forward_caller, torch_fsdp_type, torchs_fsdp2
from compiled_fsdp.frontend.gradient_methods import GradientMethods
from compiled_fsdp.frontend.pipelining import FSDP2State
from compiled_fsdp.frontend.read import Reads
from compiled_fsdp.frontend.unshard import Unsharding
from compiled_fsdp.frontend.unused import use_all, use_what_is_read
from compiled_fsdp.runtime.accumulation import drop
from compiled_fsdp.runtime.prefetcher import BOUNDARY
from compiled_fsdp.runtime.reducer import PUBLISHING
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.prefetch_lists import BACKWARD, FORWARD
from compiled_fsdp.state.unit import Unit


class FSDPModule(GradientMethods, torch.distributed.fsdp.FSDPModule):
    """Mixed into the class of every module that ``fully_shard`` was called on; FSDP2's methods.

    It is one of FSDP2's for ``isinstance``, which pipeline schedules and trainers ask; no method is inherited.
    """

    _fsdp_unit: Unit
    _fsdp2_state: FSDP2State
    _orig_cls_mro_index = (
        4  # where FSDP2's own code finds the original class: behind the new one, this one and its two bases
    )

    def reshard(self) -> None:
        """Undo ``unshard()``: drop the full parameters of this unit (not of those inside)."""
        self._fsdp_unit.reshard()

    def unshard(self, async_op: bool = False) -> Unsharding | None:
        """Gather the parameters of this unit (not of those inside), a collective call.

        Until it is resharded they read as full tensors, outside of forward too, and forwards read this one copy. The unit
        is resharded by ``reshard()``, by the end of its forward if it reshards after forward, else by its backward, and
        before ``state_dict()`` and loading.

        Args:
            async_op: only start; the result's ``wait()`` finishes. An eager forward waits by itself; a compiled one does
                not know of what is still in flight and gathers again.
        """
        unsharding = self._fsdp_unit.unshard()
        if async_op:
            return unsharding
        unsharding.wait()
        return None

    def register_post_backward_hook(self, hook: Callable[[list[nn.Parameter]], None]) -> RemovableHandle:
        """Call ``hook(params)`` in backward when a bucket of gradients is reduced: the sharded parameters of this module whose ``.grad`` it
        brought, in the order in which they were published. A ``foreach`` optimizer can step them together, and set their gradients to None.

        It comes behind their post-accumulate-grad hooks. Each parameter is in one call a backward. Where a whole graph returns all gradients at
        once (``torch.compile`` without graph breaks and without ``compiled_autograd``), there is one call.

        Returns: a handle whose ``remove()`` takes the hook away.
        """
        units = units_of(cast(nn.Module, self))
        handle = RemovableHandle(
            units[0].post_backward_hooks, extra_dict=[unit.post_backward_hooks for unit in units[1:]]
        )
        for unit in units:
            unit.post_backward_hooks[handle.id] = hook
        return handle

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change ``reshard_after_forward`` for this unit (and those inside). The next forward compiles again, once.

        Raises:
            ValueError: not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for unit in units_of(cast(nn.Module, self), recurse=recurse):
            unit.reshard_after_forward = reshard_after_forward
            unit.again, unit.again_group = 0, None  # all ranks gather in backward, or none
            unit.set_keep()

    def set_modules_to_forward_prefetch(self, modules: Iterable[Any]) -> None:
        """Ask for gathers ahead: where this unit's forward begins, those of ``modules`` go out too, in this order.

        With ``bucket="module"`` or ``"none"`` the compiled graph is in that order, instead of one unit ahead. The planner
        (``bucket="auto"``) simulates it beside its own plans and takes it if it is quicker; without a memory budget it may hold
        as much as that order does. A list of k units in front of this one is k units ahead.

        It counts inside one graph: not for buckets by size or by names, not without ``overlap``, nor from one graph of a broken
        forward to the next or uncompiled, where one set is in flight ahead. A unit without parameters of its own has no place in
        a graph, and its lists do nothing. All ranks need the same lists. The next forward compiles again, once.

        Args:
            modules: units, in the order of their launches; empty for the default. Each call replaces the list.

        Raises:
            ValueError: one of them is not sharded.
        """
        self._fsdp_unit.prefetch_lists.set(FORWARD, self._fsdp_unit, _units_listed(modules))

    def set_modules_to_backward_prefetch(self, modules: Iterable[Any]) -> None:
        """As ``set_modules_to_forward_prefetch``, for backward. The unit that backward needs next goes out as well, whether the
        list names it or not; FSDP2 leaves that to the list.

        A unit that is kept from forward to backward begins where the first of its gradients is complete.
        """
        self._fsdp_unit.prefetch_lists.set(BACKWARD, self._fsdp_unit, _units_listed(modules))

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Whether parameters that a forward did not use get zero gradients, which are reduced with the others'.

        For ranks that use different parameters of a unit, or the same in another order. A unit with it gathers all of its
        trainable parameters in forward, in evaluation too, and in backward. (FSDP2 has it from torch 2.13.)
        """
        for unit in units_of(cast(nn.Module, self), recurse=recurse):
            for module in unit.modules:
                use_all(module, unit) if reduce_scatter_unused_params else use_what_is_read(module)

    def reset_iter_state(self) -> None:
        """Close the units of this module as after a forward and a backward. An exception needs no call: units close themselves.

        ``unshard()``ed parameters are sharded again, and gradients that wait for a backward that syncs are dropped. Gradients that a
        failed backward published stay; call ``zero_grad()``.
        """
        for unit in units_of(cast(nn.Module, self)):
            unit.close()
        BOUNDARY.close()
        PUBLISHING.close_failed()
        drop(units_of(cast(nn.Module, self)))

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted: it says from which stream FSDP2 allocates gathers, which is the compiler's to do here."""

    def _get_fsdp_state(self) -> Any:
        """For torch's own functions and other libraries: what stands for FSDP2's state."""
        return self._fsdp2_state


def _units_listed(modules: Iterable[Any]) -> list[Unit]:
    listed = list(modules)
    for module in listed:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
    return [module._fsdp_unit for module in listed]


def units_of(module: nn.Module, *, recurse: bool = True) -> list[Unit]:
    """The units of ``module`` and of the modules inside, each once, outermost first."""
    modules = module.modules() if recurse else [module]
    return list(dict.fromkeys(m._fsdp_unit for m in modules if isinstance(m, FSDPModule)))


def reshard(module: nn.Module, *_: Any) -> None:
    """Undo ``unshard()`` for the parameters that ``module`` itself owns, before somebody looks at them or replaces them."""
    for parameter in cast(Any, module)._fsdp_reads.values():
        parameter.unit.reshard()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method of a unit read its parameters in full, as its forward does, with inputs and outputs cast as there.

    Nothing if ``module`` is not sharded; torch's own function if torch's FSDP2 sharded it. (Torch's function does for ours, too.)

    Raises:
        ValueError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        torchs_fsdp2().register_fsdp_forward_method(module, method_name)
        return
    inner = getattr(module, method_name, None)
    if not callable(inner):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    unit = module._fsdp_unit

    @functools.wraps(inner)
    def method(*args: Any, **kwargs: Any) -> Any:
        output = None
        try:
            args, kwargs = unit.begin(module, args, kwargs)
            output = inner(*args, **kwargs)
        finally:
            output = unit.end(module, args, output)
        return output

    register_forward_caller(method, "module")
    setattr(module, method_name, method)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Accepted: FSDP2's models share streams by it; ours have none of their own, collectives run in the process group's.
    Modules that torch's FSDP2 sharded share theirs.

    Raises:
        ValueError: one of them is not sharded.
    """
    for module in modules:
        if not isinstance(module, torch_fsdp_type()):
            raise ValueError(f"share_comm_ctx: expects modules that fully_shard was called on, but got {type(module)}")
    torchs_fsdp2().share_comm_ctx([module for module in modules if not isinstance(module, FSDPModule)])


# ---- classes ---------------------------------------------------------------------------------------------------------
_classes: dict[tuple[type, tuple[str, ...], bool], type] = {}


def shard_class(module: nn.Module, reads: dict[str, ShardedParameter], unit: Unit | None) -> None:
    """Change ``module``'s class so that ``reads`` are read through properties, and to an FSDPModule if it has a unit."""
    original = getattr(type(module), "_fsdp_original", type(module))
    is_unit = unit is not None or isinstance(module, FSDPModule)
    if unit is not None:
        module.__dict__["_fsdp_unit"] = unit
    known = module.__dict__.setdefault("_fsdp_reads", {})
    known.update(reads)
    parameters = module._parameters
    if not isinstance(parameters, Reads):
        parameters = module.__dict__["_parameters"] = Reads(parameters)
    parameters.sharded = known
    parameters.elsewhere = {name for name, parameter in known.items() if parameter.owner[0] is not module}
    key = original, tuple(known), is_unit
    if key not in _classes:
        _classes[key] = _make_class(*key)
    module.__class__ = _classes[key]


def _make_class(original: type, names: tuple[str, ...], is_unit: bool) -> type:
    bases = (FSDPModule, original) if is_unit else (original,)
    namespace: dict[str, Any] = {name: _property(name) for name in names}
    namespace |= {
        "_fsdp_original": original,
        "__new__": _new,
        "_apply": _apply,
        "register_parameter": _register_parameter,
        "__deepcopy__": _no_deepcopy,
        "__reduce_ex__": _no_pickle,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    # the original's name: policies and quantizers match classes by name
    return type(original.__name__, bases, namespace)


def _property(name: str) -> property:
    def read(module: Any) -> Any:
        if name in module._parameters:
            return module._parameters[name]
        if name in module.__dict__:  # as old-style weight_norm leaves it
            return module.__dict__[name]
        raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")

    never_a_frame_of_its_own(read)
    return property(read)


def _new(cls: Any, *args: Any, **kwargs: Any) -> Any:
    # a slice of a sharded nn.Sequential is made as type(self)(...): a new and unsharded container
    return cls._fsdp_original(*args, **kwargs)


def _apply(self: Any, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    # .to(), .cuda(), .to_empty() and the like replace what parameters hold
    reshard(self)
    self._fsdp_original._apply(self, fn, recurse)
    for parameter in self._fsdp_reads.values():
        parameter.refresh()
    return self


def _register_parameter(self: Any, name: str, param: nn.Parameter | None) -> None:
    # an assignment, or load_state_dict(assign=True)
    if name in self._fsdp_reads and param is not None:
        self._fsdp_reads[name].check(param)
    self._fsdp_original.register_parameter(self, name, param)
    if name in self._fsdp_reads and param is not None:
        self._fsdp_reads[name].replace(param)


def _no_deepcopy(self: nn.Module, memo: dict[int, Any]) -> NoReturn:
    raise RuntimeError(
        f"compiled_fsdp: a sharded {type(self).__name__} cannot be deep-copied; copy the model before fully_shard, or save and load "
        "its state_dict()."
    )


def _no_pickle(self: nn.Module, protocol: Any) -> NoReturn:
    raise RuntimeError(
        f"compiled_fsdp: a sharded {type(self).__name__} cannot be pickled; save its state_dict() with torch.distributed.checkpoint."
    )
