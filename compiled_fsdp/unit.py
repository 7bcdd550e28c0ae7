"""A unit: what one call of ``fully_shard`` shards together. It knows when its forward runs, and its repeated blocks."""

from __future__ import annotations

import logging
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import UnshardHandle

from compiled_fsdp.compat import (
    at_end_of_backward,
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
    runs_backward_of_nodes_but,
)
from compiled_fsdp.group import ShardGroup
from compiled_fsdp.parameter import ShardedParameter
from compiled_fsdp.passes import expand
from compiled_fsdp.runtime.boundary import FORWARDS
from compiled_fsdp.runtime.eager import SAVING, Open
from compiled_fsdp.runtime.gate import GATE

log = logging.getLogger(__name__)

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
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
        post_backward_hooks: by key, what wants to be told of each bucket of gradients.
        kept: what ``unshard()`` gathered, by the parameters' numbers; None if sharded.
    """

    def __init__(self, modules: tuple[nn.Module, ...], parameters: list[ShardedParameter], group: ShardGroup,
                 reshard_after_forward: bool | None) -> None:  # fmt: skip
        self._modules = [weakref.ref(module) for module in modules]
        self.parameters = parameters
        self.group = group
        self.reshard_after_forward = reshard_after_forward
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
        self.name = ""
        for number, parameter in enumerate(parameters):
            parameter.unit, parameter.number = self, number
        self.set_keep()
        self.divide()
        _units.add(self)

    @property
    def modules(self) -> list[nn.Module]:
        return [module for reference in self._modules if (module := reference()) is not None]

    # ---- forward -----------------------------------------------------------------------------------------------------
    def watch(self) -> None:
        """Open and close the unit with its modules' forwards."""
        for module in self.modules:
            hook_forward(module, self.enter, self.leave)

    def enter(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook: from here on reads are gathers."""
        self.depth += 1  # first of all: ``leave`` follows even where this raises
        if _exporting():
            raise NotImplementedError(
                "compiled_fsdp: torch.export of a sharded model would keep this rank's shards as constants. Export an unsharded copy: build the "
                "model again, and load what torch.distributed.checkpoint.state_dict.get_model_state_dict(model, options=StateDictOptions("
                "full_state_dict=True)) returns."
            )
        if self.depth > 1 and not torch.compiler.is_compiling():
            # torch calls no hook at a KeyboardInterrupt, so a forward that was interrupted has never left
            self.depth = max(forwards_on_stack(self.modules), 1)
        if self.depth == 1:
            self.full = None
            self.recomputing = None
        if not torch.compiler.is_compiling():
            _warn_of_dispatch_modes()
            if self.depth == 1:
                self.follow()

    def follow(self) -> None:
        """Take what parameters hold now, here and in the units inside, whose hooks may be part of a compiled graph."""
        for unit in (self, *self.inside):
            for parameter in unit.parameters:
                if not parameter.is_current():
                    unit.reshard()
                    parameter.refresh()

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook: the unit's parameters are sharded again once its outermost forward is over."""
        self.depth = max(self.depth - 1, 0)  # a hook that was put before ours may raise ahead of ``enter``
        if self.depth == 0:
            if not torch.compiler.is_compiling():
                self.drop()
                SAVING.stop(self)
            self.full = None
            if self.is_root:
                FORWARDS.ended = True
            if not self.keep:
                self.reshard()

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
        """Drop what ``unshard()`` gathered. What a forward has read stays for its backward."""
        if self.kept is not None:
            self.kept = None
        if self.pending is not None:
            self.pending = None

    def gathered(self) -> dict[Any, Open]:
        """``full``, to look into and to fill."""
        if self.depth == 0 and self.recomputing is not (node := running_node()):
            # nobody leaves the unit at the end of a recomputation
            self.recomputing, self.full = node, None
            at_end_of_backward(self._recomputed)
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
        self.keep = not reshard

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

    def _block_of_parameter(self) -> dict[int, int]:
        mine = {
            (id(module), name): parameter for parameter in self.parameters for module, name in parameter.live_places()
        }
        block_of: dict[int, int] = {}
        for number, block in enumerate((b for module in self.modules for b in _repeated_blocks(module)), start=1):
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
    return runs_backward_of_nodes_but(GATE)


class Unsharding(UnshardHandle):
    """The gathers of one ``unshard()``, in flight until ``wait()``."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit
        blocks: dict[Any, list[ShardedParameter]] = {}
        for parameter in unit.parameters:
            blocks.setdefault((parameter.block, parameter.shard.dtype), []).append(parameter)
        with torch.no_grad():
            self._buckets = [(members, self._launch(members)) for members in blocks.values()]

    def _launch(self, members: list[ShardedParameter]) -> torch.Tensor | None:
        if members[0].world == 1:
            return None
        return expand.launch_gather([p.shard for p in members], members[0].world, members[0].group.name)

    def wait(self) -> None:
        """Wait for the gathers; from then on the unit's parameters read in full. Nothing if it was resharded meanwhile."""
        unit, self._unit = self._unit, None
        if unit is None:
            return
        full: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for members, launched in self._buckets:
                bucket = None if launched is None else expand.wait(launched)
                offset = 0
                for p in members:
                    tensor = p.shard if bucket is None else expand.unpack_gather(bucket, offset, p.size, p.world)
                    mark_static(tensor)
                    full[p.number] = tensor
                    offset += p.shard.numel()
        self._buckets = []
        if unit.pending is self:
            unit.kept = [full[number] for number in range(len(full))]


def _repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    repeated = (
        {cls for cls, count in Counter(map(type, children)).items() if count > 1}
        if isinstance(module, _CONTAINERS)
        else ()
    )
    for child in children:
        if type(child) in repeated:
            yield child
        else:
            yield from _repeated_blocks(child)


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
for _function in (Unit.enter, Unit.leave, Unit.follow, Unit.is_open, _warn_of_dispatch_modes, _exporting, _recomputing):
    never_a_frame_of_its_own(_function)
