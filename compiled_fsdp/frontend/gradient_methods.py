"""FSDPModule's methods about gradients and memory: accumulation, divisors, process groups.

FSDP2's methods that have no meaning in compiled_fsdp are among them. They raise an error with the reason.
"""

# Why: docs/design/gradients.md, "Forward decides whether backward reduces"
# Why: docs/design/reads.md, "Kept full parameters are outputs of the graph"

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed.fsdp

from compiled_fsdp.compat.autograd import backward_id
from compiled_fsdp.runtime.context import RUNTIME
from compiled_fsdp.runtime.gate import make_accumulation_gates
from compiled_fsdp.state.registry import may_retain
from compiled_fsdp.state.unit import Unit

_Handle: Any = getattr(torch.distributed.fsdp, "GradientReductionHandle", object)


class GradientMethods:
    """The methods about gradients, mixed into ``FSDPModule``."""

    _fsdp_unit: Unit

    # ---- accumulation ------------------------------------------------------------------------------------------------
    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether the next forward's backward reduces gradients.

        Call it before the forward, because compiled code either contains the reduction or not. For example, to reduce
        once for two microbatches::

            model.set_requires_gradient_sync(False)
            model(first).sum().backward()
            model.set_requires_gradient_sync(True)
            model(second).sum().backward()  # reduces the sum of both gradients

        With False, each rank adds up its full gradients, in ``reduce_dtype``. The next backward that reduces adds these
        pending gradients to its own, and at its end reduces those that belong to parameters it did not reach. ``.grad``
        and hooks come then. If you turn sync on between a forward and its backward, that backward reduces at its end.
        If you turn it off there, it is too late: the gradients are reduced all the same, and a warning says so.

        As with FSDP2, it also sets ``set_requires_all_reduce`` to the same value, so call that one afterwards.
        """
        for unit in units_of(self, recurse=recurse):
            unit.policy.requires_gradient_sync = unit.policy.requires_all_reduce = requires_gradient_sync
            _apply_sync(unit)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether the next forward's backward also reduces gradients over the replicas of a 2-D mesh.

        With False, gradients are reduced over the ranks that shard them and stay pending. ``.grad`` comes with a
        backward that reduces over the replicas, too.

        On a 1-D mesh it has no effect without a working copy. With ``set_reshard_after_backward(8)``, gradients are
        reduced over 8 neighbouring ranks, each of which keeps an eighth of every sum. The backward of a forward with
        True also reduces these sums over the other ranks.

        Raises:
            NotImplementedError: there is a working copy, and a ``WirePolicy`` encodes gradients.
        """
        for unit in units_of(self, recurse=recurse):
            unit.policy.requires_all_reduce = requires_all_reduce
            _apply_sync(unit)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context whose forwards reduce no gradients in their backwards. It may be nested.

        It calls ``set_requires_gradient_sync(False)``. At the end, by an exception too, each unit gets back the flags
        that it had before. For example::

            with model.no_sync():
                model(first).sum().backward()
            model(second).sum().backward()  # reduces the sum of both gradients
        """
        before = [(u, u.policy.requires_gradient_sync, u.policy.requires_all_reduce) for u in units_of(self)]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, *flags in before:
                unit.policy.requires_gradient_sync, unit.policy.requires_all_reduce = flags
                _apply_sync(unit)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Do nothing, because each backward waits for its reductions, so that any backward may be the last."""

    def set_reshard_after_backward(self, reshard_after_backward: bool | int, *, recurse: bool = True) -> None:
        """Set whether a backward reshards parameters; False keeps full parameters across microbatches.

        From the next forward on, full parameters stay through forward and backward, whatever ``reshard_after_forward``
        says. They stay until a backward with True, ``reshard()``, or an optimizer's step. Call it before the forward.

        With a number, for example 8, one working copy stays in each group of 8 neighbouring ranks: each rank keeps an
        eighth of every parameter, and the following gathers stay inside the 8 ranks. ``reshard_after_forward`` still
        decides whether full parameters stay from forward to backward. For example, with 8 ranks in each node::

            for number, batch in enumerate(batches, start=1):
                model.set_reshard_after_backward(True if number == len(batches) else 8)
                model(batch).sum().backward()  # only the first forward gathers between nodes

        Uncompiled code gathers over all ranks. The first call with a number is a collective call.

        Args:
            reshard_after_backward: True, False, or a factor of the number of shards; 1 is False, and the number of
                shards is True.
            recurse: whether it is also set for the units inside.

        Raises:
            ValueError: the number is no factor of the number of shards.
            RuntimeError: gradients are pending that another number of ranks have reduced.
            NotImplementedError: a parameter has all-gather extensions, and a number is given.
        """
        units = units_of(self, recurse=recurse)
        if type(reshard_after_backward) is int:
            for unit in units:
                _make_groups_of_parts(unit, reshard_after_backward)
        for unit in units:
            if unit.set_reshard_after_backward(reshard_after_backward):
                _apply_sync(unit)
            may_retain(unit)
            unit.accumulation.expects_gradients |= unit.retain_across_microbatches

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Do nothing, because a compiled backward gathers only the parameters that it reads, in any case.

        An uncompiled one gathers each trained block that was resharded after forward, because other ranks may need it.
        """

    def finalize_backward(self, *, async_op: bool = False) -> Finalization | None:
        """Reduce the pending gradients of all units with gradient sync on. A collective call on the root module.

        Before the first forward it does nothing. (FSDP2 has it from torch 2.15.) For example::

            model.set_manual_backward_finalization(True)
            model.set_requires_gradient_sync(False)
            for batch in microbatches:
                model(batch).sum().backward()
            model.set_requires_gradient_sync(True)
            model.finalize_backward()  # reduces the sum of all gradients

        Args:
            async_op: return a handle whose ``wait()`` reduces them. Call ``wait()`` before the next forward.

        Raises:
            RuntimeError: it is called during a backward, without manual finalization, on a module inside of the root,
                before ``wait()`` of an earlier handle, or while ``set_requires_all_reduce(False)`` keeps pending
                gradients from being reduced over the replicas.
        """
        unit = self._fsdp_unit
        has_run = unit.root.accumulation.has_run or unit.root.accumulation.left_to_finalize
        finalization = Finalization(unit if has_run else None)
        if has_run:
            _check_finalization(unit)
            unit.accumulation.finalization = finalization
            if not async_op:
                finalization.wait()
        return finalization if async_op else None

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether the next forwards' backwards leave reductions to ``finalize_backward()``. Call it on the root.

        With True, a backward reduces nothing on its way: gradients stay pending until that call, or until the end of a
        backward with gradient sync on. So the microbatches of a pipeline are reduced once, in whatever order its
        schedule runs them.

        Raises:
            RuntimeError: the mode would change during a backward, or between one and its ``finalize_backward()``; or
                the module is inside of the root.
        """
        unit = self._fsdp_unit
        _check_is_root(unit, "set_manual_backward_finalization")
        if enabled != unit.policy.defer_to_finalize:
            if backward_id() != -1:
                raise RuntimeError("set_manual_backward_finalization cannot change mode during backward")
            waits = any(p.grads.waits for inner in unit.tree_units() for p in inner.parameters)
            if unit.accumulation.left_to_finalize and waits:
                raise RuntimeError(
                    "set_manual_backward_finalization cannot change mode after backward starts: call "
                    "finalize_backward() and wait for it, or reset_iter_state(), first"
                )
        for unit in units_of(self):
            if unit.policy.defer_to_finalize != enabled:
                unit.policy.defer_to_finalize = enabled
                _apply_sync(unit)

    # ---- divisors ----------------------------------------------------------------------------------------------------
    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by ``factor`` instead of the number of ranks.

        The next forward is compiled again, once.

        Raises:
            ValueError: it is not a positive number.
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or factor <= 0:
            raise ValueError(f"set_gradient_divide_factor: factor must be a positive number, but got {factor!r}")
        self._fsdp_unit.policy.divide_factor = float(factor)
        self._fsdp_unit.apply_reductions()

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """FSDP2's older name for ``set_gradient_divide_factor``."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Let the collective sum this unit's gradients, and divide afterwards; with False it may average them."""
        self._fsdp_unit.policy.force_sum = enable
        self._fsdp_unit.apply_reductions()

    # ---- groups and streams ------------------------------------------------------------------------------------------
    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduce gradients in a second process group over the same ranks, so that they run beside gathers, not after.

        It is a collective call, once for each set of ranks. The next forward is compiled again, once. (FSDP2 has it
        from torch 2.13.)
        """
        for unit in units_of(self, recurse=recurse):
            unit.change_group(lambda group: group.with_separate_reduce_scatter(enable))

    def set_post_optim_event(self, event: Any) -> None:
        """Let the current stream wait for ``event``, which was recorded after an optimizer's step on another stream.

        The stream that computes has to wait, because collectives follow it.
        """
        if torch.accelerator.is_available():  # else there is one stream
            torch.accelerator.current_stream().wait_event(event)


def units_of(module: Any, *, recurse: bool = True) -> list[Unit]:
    """The units of ``module`` and (with ``recurse``) of the modules inside, each once, outermost first."""
    modules = module.modules() if recurse else [module]
    return list(dict.fromkeys(m._fsdp_unit for m in modules if isinstance(m, GradientMethods)))


def _apply_sync(unit: Unit) -> None:
    if unit.apply_sync():
        for parameter in unit.parameters if unit.accumulation.within else ():
            if parameter.reduce_codec[0]:
                raise NotImplementedError(
                    f"set_requires_all_reduce: gradients of {parameter.name!r} are encoded ({parameter.wire}), and "
                    "encoded gradients are not reduced in two parts. Use a WirePolicy without reduce for its unit, or "
                    "leave set_requires_all_reduce at True."
                )
        make_accumulation_gates(unit.parameters)
        unit.apply_texts()


def _make_groups_of_parts(unit: Unit, ranks: int) -> None:
    """Make the groups of ``ranks`` neighbours that gather parts of the unit's parameters, or raise an error."""
    for parameter in unit.parameters:
        if not 1 <= ranks <= parameter.world or parameter.world % ranks:
            raise ValueError(
                "set_reshard_after_backward: a number should be a factor of the number of shards, which is "
                f"{parameter.world} for {parameter.name!r}, not {ranks}"
            )
        if 1 < ranks < parameter.world:
            pending = parameter.grads.partial_reduce_output is not None and parameter.ranks_of_partial
            if pending not in (False, ranks, parameter.world):
                raise RuntimeError(
                    f"set_reshard_after_backward: gradients are pending that {pending} ranks have reduced (of "
                    f"{parameter.name!r}, for example), so the number has to be {pending}, not {ranks}. Change it "
                    "after a backward under set_requires_all_reduce(True)."
                )
            if parameter.wrapped:
                raise NotImplementedError(
                    f"set_reshard_after_backward: parameter {parameter.name!r} has all-gather extensions, of whose "
                    "gathered tensors no parts can be kept. Use True or False for its unit (recurse=False)."
                )
            parameter.group.part_of(ranks)


def _check_is_root(unit: Unit, method: str) -> None:
    if not unit.is_root:
        raise RuntimeError(f"{method} must be called on the root FSDP module, but {unit.name!r} is inside of another")


def _check_finalization(unit: Unit) -> None:
    """Raise RuntimeError, in FSDP2's words, if ``finalize_backward()`` cannot be called now."""
    if unit.root.accumulation.finalization is not None:
        raise RuntimeError(
            "The previous gradient reduction must be waited on before finalizing backward again: call wait() of the "
            "handle that finalize_backward(async_op=True) returned"
        )
    _check_is_root(unit, "finalize_backward")
    if not unit.policy.defer_to_finalize:
        raise RuntimeError(
            "FSDP finalize_backward requires manual backward finalization. Call "
            "set_manual_backward_finalization(True) before forward"
        )
    if backward_id() != -1:
        raise RuntimeError("FSDP finalize_backward must be called after backward completes")
    for inner in unit.tree_units():
        if inner.policy.requires_gradient_sync and not inner.reduces and any(p.grads.waits for p in inner.parameters):
            raise RuntimeError(
                f"FSDP manual backward finalization requires all-reduce for parameter group {inner.name!r}. Call "
                "set_requires_all_reduce(True) before finalization"
            )


class Finalization(_Handle):
    """The handle that ``finalize_backward(async_op=True)`` returns; from torch 2.15 on, also of FSDP2's type."""

    def __init__(self, root: Unit | None) -> None:
        self._root = root

    def wait(self) -> None:
        """Reduce the pending gradients. A second call does nothing.

        Raises:
            RuntimeError: ``reset_iter_state()`` was called meanwhile.
        """
        root, self._root = self._root, None
        if root is None:
            return
        accumulation = root.accumulation
        if accumulation.finalization is not self:
            raise RuntimeError("This gradient reduction handle was invalidated")
        accumulation.finalization, accumulation.left_to_finalize = None, False
        units = root.tree_units()
        RUNTIME.reducer.reduce_accumulated(unit for unit in units if unit.reduces)
        for unit in units:
            if unit.policy.reshard_after_backward:
                unit.reshard()
        _check_that_gradients_came(units)


def _check_that_gradients_came(units: list[Unit]) -> None:
    """Raise NotImplementedError if a pipeline schedule has run backwards but no gradient came.

    Otherwise nothing would be trained, without any error.
    """
    trained = [
        p
        for unit in units
        if unit.accumulation.expects_gradients and unit.reduces
        for p in unit.parameters
        if p.param.requires_grad
    ]
    for unit in units:
        unit.accumulation.expects_gradients = False
    if trained and all(parameter.param.grad is None for parameter in trained):
        raise NotImplementedError(
            f"compiled_fsdp: backwards have run, but {trained[0].name!r} and the stage's other parameters got no "
            "gradient. Pipeline schedules that split a backward into one for inputs and one for weights (zero bubble) "
            "search the autograd graph for parameters, and sharded parameters are not in it. Use a schedule of full "
            "backwards, for example GPipe, 1F1B or Interleaved1F1B."
        )


_NO_MEANING = {
    "set_custom_all_gather": "gathers are operations of the compiled graph, which the passes bucket and move; there is "
    "no call to replace",
    "set_custom_reduce_scatter": "reductions are operations of the compiled graph, which the passes bucket and move; "
    "there is no call to replace",
    "set_all_reduce_hook": "gradients of several units are reduced in one bucket, as the plan has it; "
    "register_post_accumulate_grad_hook of a parameter and register_post_backward_hook see what is reduced",
    "set_allocate_memory_from_process_group_for_comm": "the compiler allocates the memory of collectives; "
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK=1 registers all of PyTorch's memory with NCCL",
    "set_symm_mem_for_comm": "the compiler allocates the memory of collectives; the backend's option "
    "transport='symm_mem' sends all of them over symmetric memory, by copy engines",
    "set_reduce_scatter_max_input_buffers": "the planner bounds what is in flight; give the backend's option "
    "'memory_budget'",
    "set_keep_unsharded_storage": "the compiler allocates full parameters; use set_reshard_after_backward(False) to "
    "keep them",
}
"""FSDP2's methods that configure its own runtime, each with the reason why compiled_fsdp does not have it."""


def no_meaning(name: str) -> Callable[..., NoReturn]:
    """Make the method ``name``, which raises NotImplementedError with the reason."""

    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"compiled_fsdp: {name}() has no meaning here: {_NO_MEANING[name]}. Leave the call out."
        )

    method.__name__ = name
    method.__doc__ = f"Raises NotImplementedError: {_NO_MEANING[name]}."
    return method


for _name in _NO_MEANING:
    setattr(GradientMethods, _name, no_meaning(_name))
