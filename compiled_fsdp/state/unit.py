"""A unit: what one call of ``fully_shard`` shards together. It knows when its forward runs, and its repeated blocks."""

from __future__ import annotations

import functools
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from compiled_fsdp.comm.reduction import ALL, NONE, SCATTER, Reduction, divide_factors
from compiled_fsdp.compat import (
    at_end_of_backward,
    backward_id,
    compiling_is_on,
    dispatch_modes_active,
    dynamo_looks_around,
    forwards_on_stack,
    hook_forward,
    innermost_forward,
    mark_static,
    never_a_frame_of_its_own,
    never_compiled,
    running_node,
)
from compiled_fsdp.frontend.eager_reads import SAVING, Open
from compiled_fsdp.frontend.unshard import Unsharding
from compiled_fsdp.runtime.gate import recomputes
from compiled_fsdp.runtime.prefetcher import FORWARDS
from compiled_fsdp.runtime.reducer import PUBLISHING
from compiled_fsdp.sharding.blocks import repeated_blocks
from compiled_fsdp.sharding.precision import cast, casts_inputs
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.prefetch_lists import PrefetchLists

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from compiled_fsdp.sharding.process_groups import ShardGroup

log = logging.getLogger(__name__)

_warned_modes = False
_units: weakref.WeakSet[Unit] = weakref.WeakSet()


def any_unit_lives() -> bool:
    """Whether the process has a sharded model."""
    return len(_units) > 0


def running_parameters() -> list[ShardedParameter]:
    """The parameters of the units whose forward is running, and of those inside."""
    units = dict.fromkeys(inner for unit in _units if unit.depth > 0 for inner in (unit, *unit.inside))
    return [parameter for unit in units for parameter in unit.parameters]


def forward_is_in_parts() -> bool:
    """Asked while Dynamo compiles: whether eager code is between a unit's forward, which is running, and what is compiled."""
    module = innermost_forward()
    return any(unit.depth > 0 and all(module is not own for own in unit.modules) for unit in _units)


class Unit:
    """The state of one ``fully_shard`` call.

    Attributes:
        parameters: the sharded parameters, in registration order.
        inside: the units in the unit's modules.
        keep: whether full parameters stay from forward to backward; what ``reshard_after_forward`` comes to.
        depth: how many forwards of the unit are running; while there are any, reading a parameter gathers it.
        full: eager only: the blocks gathered so far in this forward, or in the recomputation that the autograd node
            ``recomputing`` does.
        tied: the trainable parameters by number, in a forward whose unused parameters get zero gradients (``unused.py``).
        prefetch_lists: what is to be gathered ahead with it.
        post_backward_hooks: by key, what wants to be told of each bucket of gradients.
        kept: what ``unshard()`` gathered, by the parameters' numbers; None if sharded.
        sync: how far the gradients of the next forward are reduced (``compiled_fsdp/comm/reduction.py``).
        ran: of a root, whether a forward with gradients has ended since somebody looked (``look_what_ran``).
        accumulates: whether a forward was ever asked for whose gradients wait. waits: whether some wait, or will. plain: whether there was
            a forward that does not add what waits, so that there is code for it.
        reduces: whether gradients that wait are to be reduced, as ``requires_sync`` and ``requires_all_reduce`` say; by the end of a
            backward at the latest. defers: whether forwards leave it to that, or to ``finalize_backward()``.
        expects: whether a backward was announced since the last ``finalize_backward()``, as schedules do before each one.
        retains: whether full parameters stay until a backward that reshards; holds: whether there are some.
        again: how many ranks gather in backward; 0 for all. ``again_group``: those with this rank.
        divide_factor, force_sum: the user's divisor of gradients, and whether it divides a sum.
        outer: the unit that this one is directly or indirectly inside of, outermost.
        trains: eager only: whether the running forward began with gradients on. forward_in: the backward in which it began, -1 for none.
        in_parts: whether a part of the last forward was run again in a backward, alone. perhaps_again: eager only: whether one that has
            read without gradients may be, in a backward of its own, so that gradients of one forward come from several.
    """

    def __init__(self, modules: tuple[nn.Module, ...], parameters: list[ShardedParameter], policy: MixedPrecisionPolicy | None,
                 reshard_after_forward: bool | None, again_group: ShardGroup | None = None) -> None:  # fmt: skip
        self._modules = [weakref.ref(module) for module in modules]
        self.parameters = parameters
        self.cast_inputs, self.cast_outputs = casts_inputs(policy), policy.output_dtype if policy is not None else None
        self.reshard_after_forward = reshard_after_forward
        self.again_group = again_group
        self.again = 0 if again_group is None else again_group.size
        self.requires_sync = self.requires_all_reduce = self.reshard_after_backward = True
        self.accumulates = self.retains = self.holds = self.defers = self.expects = False
        self.sync, self.reduces = ALL, True
        self.ran = self.waits = self.plain = False
        self.divide_factor: float | None = None
        self.force_sum = False
        self.outer: weakref.ref[Unit] | None = None
        self.trains = self.in_parts = self.perhaps_again = False
        self.forward_in = -1
        self.is_root = True
        self.inside: list[Unit] = []
        self.keep = False
        self.depth = 0
        self.full: dict[Any, Open] | None = None
        self.recomputing: Any = None
        self.kept: list[torch.Tensor] | None = None
        self.pending: Unsharding | None = None
        self.tied: dict[int, torch.Tensor] | None = None
        self.post_backward_hooks: OrderedDict[int, Callable[[list[nn.Parameter]], None]] = OrderedDict()
        self.prefetch_lists = PrefetchLists()
        self.name = ""
        self._together: dict[Any, list[ShardedParameter]] | None = None
        for number, parameter in enumerate(parameters):
            parameter.unit, parameter.number = self, number
        self.set_keep()
        self.set_reductions()
        self.divide()
        _units.add(self)

    @property
    def modules(self) -> list[nn.Module]:
        return [module for reference in self._modules if (module := reference()) is not None]

    # ---- forward -----------------------------------------------------------------------------------------------------
    def watch(self) -> None:
        """Open and close the unit with its modules' forwards."""
        for module in self.modules:
            hook_forward(module, self.enter if self.cast_inputs is None else self.enter_and_cast, self.leave)

    def enter_and_cast(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The same as ``enter``, with a mixed-precision policy that casts inputs."""
        self.enter(module, args)
        return cast(self.cast_inputs, args), cast(self.cast_inputs, kwargs)

    def enter(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook: from here on reads are gathers."""
        self.depth += 1  # first of all: ``leave`` follows even where this raises
        if _exporting():
            raise NotImplementedError(
                "compiled_fsdp: torch.export of a sharded model would keep this rank's shards as constants. Export an unsharded copy: build the "
                "model again, and load what torch.distributed.checkpoint.state_dict.get_model_state_dict(model, options=StateDictOptions("
                "full_state_dict=True)) returns."
            )
        if self.prefetch_lists.key:
            pass  # looked at, so that Dynamo guards on it: other lists are another plan
        if self.depth > 1 and not torch.compiler.is_compiling():
            # torch calls no hook at a KeyboardInterrupt, so a forward that was interrupted has never left
            self.depth = max(forwards_on_stack(self.modules), 1)
        if self.depth == 1:
            self.full = None
            self.recomputing = None
        if not torch.compiler.is_compiling():
            _warn_of_dispatch_modes()
            if self.depth == 1:
                self.trains, self.forward_in = torch.is_grad_enabled(), backward_id()
                self.in_parts = self.perhaps_again = False
                self.follow()

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A forward begins that is no ``forward``: what the hook does there. Returns args and kwargs, cast as the policy has it."""
        if self.cast_inputs is not None:
            return self.enter_and_cast(module, args, kwargs)
        self.enter(module, args)
        return args, kwargs

    def end(self, module: nn.Module, args: Any, output: Any) -> Any:
        """It ends, as ``begin``. Returns the output, cast as the policy has it."""
        left = self.leave(module, args, output)
        return output if self.cast_outputs is None else left

    def follow(self) -> None:
        """Take what parameters hold now, here and in the units inside, whose hooks may be part of a compiled graph."""
        for unit in (self, *self.inside):
            for parameter in unit.parameters:
                if not parameter.is_current():
                    unit.reshard()
                    parameter.refresh()

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook: the unit's parameters are sharded again once its outermost forward is over. Returns the output, if it is cast."""
        self.depth = max(self.depth - 1, 0)  # a hook that was put before ours may raise ahead of ``enter``
        if self.depth == 0:
            if not torch.compiler.is_compiling():
                self.drop()
                SAVING.stop(self)
                if self.accumulates and self.trains:
                    PUBLISHING.watch(self, output)
            self.full = None
            if self.is_root:
                FORWARDS.ended = True
                if torch.is_grad_enabled():
                    self.ran = True
            if self.retains:
                self.holds = True
            elif not self.keep:
                self.reshard()
        return None if self.cast_outputs is None else cast(self.cast_outputs, output)

    @never_compiled
    def drop(self) -> None:
        """Let go of what eager code has gathered."""
        for opened in (self.full or {}).values():
            opened.free()
        self.full = None

    def close(self) -> None:
        """Sharded, and no forward running."""
        self.drop()
        self.depth = 0
        self.full = self.recomputing = self.tied = None
        self.reshard()

    def is_open(self) -> bool:
        """Whether a parameter reads in full: in a forward of the unit, where backward recomputes a part of it, and unsharded."""
        if self.depth > 0 or self.kept is not None:
            return not dynamo_looks_around()  # a rank that compiles again alone must not gather alone
        # gates run the user's hooks, and those see sharded parameters
        return _recomputing()

    # ---- full between forwards ---------------------------------------------------------------------------------------
    def unshard(self) -> Unsharding:
        """Start gathering all parameters, a bucket for each block; or what is in flight or done already."""
        if any(parameter.shard.is_meta for parameter in self.parameters):
            self.raise_meta()
        if self.pending is None:
            self.pending = Unsharding(self)
        return self.pending

    def kept_now(self) -> list[torch.Tensor] | None:
        """``kept``, once what is in flight has come."""
        if self.kept is None and self.pending is not None:
            self.pending.wait()
        return self.kept

    def reshard(self) -> None:
        """Drop what ``unshard()`` gathered, and what is retained. What a forward has read stays for its backward."""
        if self.kept is not None:
            self.kept = None
        if self.pending is not None:
            self.pending = None
        if self.holds:
            self.holds = False
            for parameter in self.parameters:
                parameter.retained = None

    def after_backward(self, parameter: ShardedParameter) -> None:
        """A gradient has come: sharded again, unless parameters are to stay full for the next microbatch."""
        if self.reshard_after_backward:
            self.reshard()
        elif self.holds and parameter.retained is not None:
            mark_static(parameter.retained)

    def gathered(self) -> dict[Any, Open]:
        """``full``, to look into and to fill."""
        if self.depth == 0 and self.recomputing is not (node := running_node()):
            # nobody leaves the unit at the end of a recomputation
            self.recomputing, self.full = node, None
            at_end_of_backward(self._recomputed)
            self.in_parts = True
            PUBLISHING.take_part(self)
        if self.full is None:
            self.full = {}
        return self.full

    def _recomputed(self) -> None:
        if self.depth == 0:
            self.recomputing = self.full = None

    def raise_meta(self) -> None:
        """Name the parameters that were never materialised."""
        names = [parameter.name for parameter in self.parameters if parameter.shard.is_meta]
        raise RuntimeError(
            "FSDP parameters should be materialized from meta device before training, but the following were still on meta "
            f"device: {names}\nFor example, call module.to_empty(device=...) and then module.reset_parameters() on each module, "
            "or load a checkpoint."
        )

    # ---- what stays unsharded ----------------------------------------------------------------------------------------
    def set_keep(self) -> None:
        """Apply ``reshard_after_forward``; None means: reshard, except at the root, whose backward comes first."""
        reshard = (not self.is_root) if self.reshard_after_forward is None else self.reshard_after_forward
        self.keep = not reshard or self.retains

    # ---- gradients ---------------------------------------------------------------------------------------------------
    def set_sync(self) -> None:
        """Apply ``requires_sync``, ``requires_all_reduce`` and ``defers``."""
        replicated = any(parameter.group.replicas > 1 for parameter in self.parameters)
        self.look_what_ran()
        wanted = NONE if not self.requires_sync else SCATTER if replicated and not self.requires_all_reduce else ALL
        self.reduces = wanted == ALL
        self.sync = NONE if self.defers else wanted
        if self.sync != ALL and not self.accumulates:
            self.accumulates = True
            for parameter in self.parameters:
                parameter.make_waiting_gates()
            self.set_reductions()
        self.set_texts()

    def look_what_ran(self) -> None:
        """Before ``sync`` changes: of each unit of the model, whether gradients of the last forwards wait, perhaps of a
        backward to come.

        It is the root that notes its forwards: another unit's may be inside of a checkpoint, where traced code may not
        change a thing.
        """
        root = self.root
        if not root.ran:
            return
        root.ran = False
        for unit in (root, *root.inside):
            if unit.sync != ALL:
                unit.waits = True
            elif not unit.adds:
                unit.plain = True

    @property
    def adds(self) -> bool:
        """Whether the backward of the next forward adds what waits.

        Dynamo guards on it, by the reductions' texts, so it says what that backward has to do and not which flags were
        set before. Where nothing waits, and there was never a forward without what waits, both codes are right, and
        only one may be there.
        """
        return self.sync != ALL or self.waits or (self.accumulates and not self.plain)

    def set_texts(self) -> None:
        """Choose what graphs are told of the reductions, by ``sync`` and ``adds``."""
        adds = self.adds
        for parameter in self.parameters:
            parameter.reduction = parameter.texts[self.sync, adds]

    def set_waits(self, waits: bool) -> None:
        """A gradient waits from now on, or none does."""
        self.look_what_ran()
        if self.waits != waits:
            self.waits = waits
            self.set_texts()

    def set_reductions(self) -> None:
        """What becomes of gradients: by the policy's dtypes, the user's divisor, and whether some may wait."""
        for parameter in self.parameters:
            dtype = str(parameter.reduce_dtype).removeprefix("torch.")
            divide = divide_factors(dtype, parameter.group.ranks_in_all, self.divide_factor, self.force_sum)
            how = Reduction(dtype, divide, waiting=self.accumulates)
            parameter.how = how
            parameter.texts = {(ALL, False): str(replace(how, waiting=False))}
            parameter.texts |= {
                (sync, True): str(replace(how, sync=sync, waiting=True)) for sync in (ALL, SCATTER, NONE)
            }
        self.set_texts()

    def set_group(self, change: Callable[[ShardGroup], ShardGroup]) -> None:
        """Put the unit's parameters into other process groups over the same ranks."""
        for parameter in self.parameters:
            parameter.group = change(parameter.group)
            parameter.label = parameter.group.label
        self.regroup()

    def set_retains(self) -> None:
        """Apply ``reshard_after_backward``: without it parameters stay full from their first forward on."""
        self.retains = not self.reshard_after_backward
        self.set_keep()
        if self.retains:
            _watch_optimizers()

    def family(self) -> list[Unit]:
        """The units of the model that this one is part of, outermost first."""
        return [self.root, *self.root.inside]

    @property
    def root(self) -> Unit:
        """The outermost unit of that model."""
        return (self.outer() if self.outer is not None else None) or self

    # ---- repeated blocks ---------------------------------------------------------------------------------------------
    def divide(self) -> None:
        """Give every parameter its block and its place in it.

        A unit inside another unit is one block: the user has chosen the size. A root is divided where a container
        (ModuleList, Sequential, ModuleDict) holds several modules of one class, as a transformer's layers; what is left
        (embedding, norm, head) is a block of its own. So one call on the root is bucketed like a call per layer.
        """
        blocks: dict[int, list[ShardedParameter]] = {}
        block_of = self._block_of_parameter() if self.is_root else {}
        for parameter in self.parameters:
            blocks.setdefault(block_of.get(id(parameter), 0), []).append(parameter)
        for number, members in blocks.items():
            for position, parameter in enumerate(members):
                parameter.block, parameter.block_size, parameter.position = number, len(members), position
        self.regroup()

    def gathered_together(self) -> dict[Any, list[ShardedParameter]]:
        """Outside of graphs: the parameters that share collectives (``ShardedParameter.together``), in registration order."""
        if self._together is None:
            self._together = {}
            for parameter in self.parameters:
                self._together.setdefault(parameter.together, []).append(parameter)
        return self._together

    def regroup(self) -> None:
        """Blocks or dtypes have changed."""
        self._together = None

    def _block_of_parameter(self) -> dict[int, int]:
        mine = {
            (id(module), name): parameter for parameter in self.parameters for module, name in parameter.live_places()
        }
        block_of: dict[int, int] = {}
        for number, block in enumerate((b for module in self.modules for b in repeated_blocks(module)), start=1):
            for module in block.modules():
                for name in module._parameters:
                    if (parameter := mine.get((id(module), name))) is not None:
                        block_of.setdefault(id(parameter), number)
        return block_of

    # ---- names, for people -------------------------------------------------------------------------------------------
    def name_from(self, root: nn.Module) -> None:
        """Name unit and parameters as seen from ``root``."""
        modules = self.modules
        names = {id(module): name for name, module in root.named_modules()}
        self.name = ", ".join(names.get(id(module), "") for module in modules) or type(root).__name__
        for parameter in self.parameters:
            module, attribute = parameter.owner
            prefix = names.get(id(module), "")
            parameter.name = f"{prefix}.{attribute}" if prefix else attribute


@torch.compiler.assume_constant_result
def _exporting() -> bool:
    return torch.compiler.is_exporting()  # traced by torch 2.11's Dynamo it would be True in any compile


@torch.compiler.assume_constant_result
def _recomputing() -> bool:
    return recomputes()


@functools.cache
def _watch_optimizers() -> None:
    """What is retained is dropped by a step of an optimizer, which writes to the shards."""

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        holding = [unit for unit in _units if unit.holds]
        if holding:
            params = {id(param) for group in optimizer.param_groups for param in group["params"]}
            for unit in holding:
                if any(id(parameter.param) in params for parameter in unit.parameters):
                    unit.reshard()

    register_optimizer_step_pre_hook(before_step)


def _warn_of_dispatch_modes() -> None:
    global _warned_modes
    if not _warned_modes and compiling_is_on() and (modes := dispatch_modes_active()):
        _warned_modes = True
        log.warning(
            "a dispatch mode (%s) is active around a compiled call: Dynamo does not compile under it, so this model runs "
            "uncompiled, with one collective per parameter. Results are right; to see the collectives of the compiled model "
            "use compiled_fsdp.explain(model) or torch.profiler.",
            ", ".join(modes),
        )


# Alone, a compiled ``enter`` would have no graph and none of what it does in eager code.
for _function in (
    Unit.enter,
    Unit.enter_and_cast,
    Unit.leave,
    Unit.begin,
    Unit.end,
    Unit.follow,
    Unit.is_open,
    backward_id,
    _warn_of_dispatch_modes,
    _exporting,
    _recomputing,
):
    never_a_frame_of_its_own(_function)
