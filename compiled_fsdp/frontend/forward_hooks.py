"""The forward hooks of a unit: from the start to the end of its forward, reads of its parameters are gathers."""

# Why: docs/design/graph-breaks.md, "The next gather is predicted from parameter sets"
# Why: docs/design/torch.md, "Guards do not depend on counters"

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from compiled_fsdp.base.logs import warn_once
from compiled_fsdp.compat.autograd import backward_id, dispatch_modes_active
from compiled_fsdp.compat.compiled_autograd import in_compiled_autograd
from compiled_fsdp.compat.dynamo import compiling_is_on
from compiled_fsdp.compat.modules import forwards_on_stack, hook_forward
from compiled_fsdp.compat.nested_regions import in_lasting_body
from compiled_fsdp.frontend.eager_reads import drop_blocks, keep_reads, watch_frozen
from compiled_fsdp.frontend.in_checkpoints import reshard_unseen, runs_twice
from compiled_fsdp.frontend.refresh import refresh, refresh_all
from compiled_fsdp.runtime.context import RUNTIME
from compiled_fsdp.sharding.precision import cast
from compiled_fsdp.state.unit import ShardState, Unit

log = logging.getLogger(__name__)


class ForwardHooks:
    """The hooks of one unit's modules.

    Dynamo traces them and guards on each step of a chain of attributes, so they read the unit through short chains.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def register(self) -> None:
        """Let the forwards of the unit's modules open and close the unit."""
        for module in self.unit.modules:
            hook_forward(module, self.enter if self.unit.policy.input_dtype is None else self.begin, self.end)

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """``enter`` with a cast of the inputs, also for a method that reads parameters as ``forward`` does.

        Returns args and kwargs, cast if a mixed-precision policy says so.
        """
        self.enter(module, args)
        dtype = self.unit.policy.input_dtype
        return cast(dtype, args), cast(dtype, kwargs)

    def enter(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook: open the unit, so that reads are gathers from here on."""
        unit = self.unit
        # this comes first, because ``end`` is called even if the rest raises
        in_body = torch.compiler.is_dynamo_compiling() and unit.open_in_body()
        if not in_body:
            unit.depth += 1
        if _exporting():
            raise NotImplementedError(
                "compiled_fsdp: torch.export of a sharded model would keep this rank's shards as constants. Export an "
                "unsharded copy: build the model again, and load what "
                "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, options=StateDictOptions("
                "full_state_dict=True)) returns."
            )
        if unit.is_root and unit.accumulation.finalization is not None:
            raise RuntimeError(
                "The previous gradient reduction must be waited on before forward: call wait() of the handle that "
                "finalize_backward(async_op=True) returned"
            )
        if unit.prefetch_lists.key:
            pass  # read here so that Dynamo guards on it, because other lists need another plan
        if in_body:
            return
        if unit.depth > 1 and not torch.compiler.is_compiling():
            # torch calls no hook at a KeyboardInterrupt, so an interrupted forward never came to ``end``
            unit.depth = max(forwards_on_stack(unit.modules), 1)
        if unit.depth == 1:
            unit.eager.forget()
        if torch.compiler.is_compiling():
            if unit.is_root:
                unit.eager.below_compile = True  # always the same value, so that traced code sets it without a guard
            self.follow_grad_dtypes()
            return
        _warn_of_dispatch_modes()
        if unit.depth == 1:
            eager = unit.eager
            eager.trains, eager.backward = torch.is_grad_enabled(), backward_id()
            eager.may_run_again = False
            eager.in_parts = eager.backward != -1 and unit.is_group  # backward runs one of the group's modules again
            if eager.in_parts and not in_compiled_autograd():
                RUNTIME.reducer.take_part(unit)
            eager.below_compile = unit.is_root and compiling_is_on()
            eager.kept, eager.gathered_again = {}, set()
            if unit.is_outermost:
                # not below ``torch.compile``, where other ranks may run this code in a graph
                notes_frozen = eager.trains and eager.backward == -1 and not compiling_is_on()
                unit.root.eager.frozen = {} if notes_frozen else None
            refresh_all(unit)

    @torch.compiler.assume_constant_result
    def follow_grad_dtypes(self) -> bool:
        """While Dynamo traces: follow a ``grad_dtype`` that the user has set on a parameter since it was sharded.

        It makes no guard, because FSDP2 does not follow a change after the first forward at all. After such a change
        ``ShardedParameter.set_grad`` raises.
        """
        changed = [parameter for parameter in self.unit.parameters if not parameter.has_grad_dtype()]
        for parameter in changed:
            refresh(parameter)
        return bool(changed)

    def end(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook: close the unit at the end of its outermost forward, and reshard it if its switches say so.

        Returns the output, cast if a mixed-precision policy says so.
        """
        unit = self.unit
        in_body = torch.compiler.is_dynamo_compiling() and unit.close_in_body()
        if not in_body:
            unit.depth = max(unit.depth - 1, 0)  # another pre-hook, in front of ``enter``, may have raised
        if not unit.is_open:
            unit.put_back()
            if not torch.compiler.is_compiling():
                keep_reads(unit, output)
                drop_blocks(unit)
                RUNTIME.saved_tensors.stop(unit)
                if unit.is_outermost:
                    watch_frozen(unit, output)
                if unit.accumulation.enabled and unit.eager.trains:
                    RUNTIME.reducer.watch_output(unit, output)
            if not in_body:
                unit.eager.blocks = None
                if unit.keep_for_backward and torch.compiler.is_compiling() and torch.is_grad_enabled():
                    unit.eager.reads = None
            if unit.is_root:
                if unit.reshards_others and not in_body:
                    for inner in unit.inner_units:
                        if inner.resharded_by_root and not inner.keep_for_backward:
                            inner.reshard()
                RUNTIME.prefetcher.forward_ended = RUNTIME.follower.known.forward_ended = True
                if torch.is_grad_enabled():
                    unit.accumulation.forward_ended = True
            if not unit.retain_across_microbatches:
                if unit.keep_for_backward:
                    pass
                elif in_body and (runs_twice() or unit.state is not ShardState.SHARDED):
                    unit.let_root_reshard()
                elif runs_twice():
                    reshard_unseen(unit)
                else:
                    unit.reshard()
            elif in_body and in_lasting_body():
                unit.end_in_checkpoint()
            elif runs_twice():
                pass  # the forward has retained nothing
            elif unit.unsharded_params is not None and unit.ranks_of_parts:
                if not unit.keep_for_backward:
                    unit.reshard()
            elif unit.unsharded_params is None and torch.is_grad_enabled():
                unit.state = ShardState.RETAINED
            elif unit.state is ShardState.SHARDED:
                unit.drop_retained()  # a part of the forward may have read parameters with gradients
        return cast(unit.policy.output_dtype, output)


def close(unit: Unit) -> None:
    """Reshard the unit's parameters and forget its forwards, none of which may be running."""
    drop_blocks(unit)
    unit.depth = 0
    unit.eager.forget()
    unit.forget_reads()
    unit.zero_grad_params = None
    unit.put_back()
    unit.reshard()


@torch.compiler.assume_constant_result
def _exporting() -> bool:
    return torch.compiler.is_exporting()  # not traced, because torch 2.11's Dynamo takes it for True in any compile


def _warn_of_dispatch_modes() -> None:
    if compiling_is_on() and (modes := dispatch_modes_active()):
        warn_once(
            log,
            "dispatch modes",
            "a dispatch mode (%s) is active around a compiled call: Dynamo does not compile under it, so this model "
            "runs uncompiled, with one collective per parameter. Results are right; to see the collectives of the "
            "compiled model use compiled_fsdp.explain(model) or torch.profiler.",
            ", ".join(modes),
        )
