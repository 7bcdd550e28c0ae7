"""Reads in eager code: a bucket for each repeated block, not held from forward to backward.

The first read of a block's parameter gathers the whole block, through the same door as compiled graphs (``boundary.py``). What
autograd saves of the full parameters is replaced by a note which and how (``Saving``), and gathered again when backward asks;
the last note of a forward that is used up frees it. Gradients are collected until all of the block's are there, and
reduced in one bucket (``publishing.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from compiled_fsdp import ops
from compiled_fsdp.comm.reduction import NONE, Reduction
from compiled_fsdp.compat import (
    at_end_of_backward,
    backward_id,
    local_of,
    never_a_frame_of_its_own,
    never_compiled,
    outside_of_transforms,
    pop_saving_hooks,
    push_saving_hooks,
    saving_hooks,
    storage_pointer,
)
from compiled_fsdp.runtime.reducer import PUBLISHING, Expected
from compiled_fsdp.state import registry

if TYPE_CHECKING:
    from compiled_fsdp.state.parameter import ShardedParameter
    from compiled_fsdp.state.unit import Unit


class Block:
    """A block's parameters: in full for backward, for as long as a note needs them.

    It is kept by ``Open`` and by notes, and keeps nothing of the forward alive.
    """

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        self.parameters = list(parameters)
        self.open: weakref.ref[Open] | None = None
        self._again: list[Tensor] | None = None
        self._backward = -1

    @never_compiled
    def again(self, index: int) -> Tensor:
        """The full parameter while a backward runs, gathered anew."""
        opened = self.open() if self.open is not None else None
        if opened is not None and opened.fulls is not None:  # backward runs inside of the forward
            return opened.fulls[index]
        if backward_id() == -1:
            raise RuntimeError(
                f"compiled_fsdp: {self.parameters[index].name!r}, which autograd needs for backward, was looked at outside of a backward. It is not "
                "held from forward to backward; shard with reshard_after_forward=False to hold it."
            )
        if self._again is None or self._backward != backward_id():
            # where notes outlive the backward (retain_graph)
            at_end_of_backward(partial(_end_backward, weakref.ref(self)))
            self._again, self._backward = self.gathered(), backward_id()
        return self._again[index]

    def drop(self) -> None:
        """Let go of what backward has gathered."""
        self._again = None

    def gathered(self) -> list[Tensor]:
        """The full parameters: a collective call."""
        parameters = self.parameters
        sizes = [size for parameter in parameters for size in parameter.size]
        with torch.no_grad(), torch.inference_mode(False):  # autograd may save them
            fulls = ops.gather_full(
                [p.shard for p in parameters],
                [p.slot for p in parameters],
                sizes,
                parameters[0].world,
                parameters[0].dtype,
            )
        if not parameters[0].unit.keep:
            for index, full in enumerate(fulls):
                SAVING.know(full, self, index)
        return fulls


def _end_backward(reference: weakref.ref[Block]) -> None:
    if (block := reference()) is not None:
        block.drop()


class Open:
    """A block in the forward that is running (or in a recomputation of a part of it).

    Attributes:
        fulls: None once another block runs.
        expected: how many gradients its reads will bring.
    """

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        self.block = Block(parameters)
        self.block.open = weakref.ref(self)
        self.fulls: list[Tensor] | None = None
        self.expected = Expected()
        self._reads: dict[int, Tensor] = {}

    def full(self, parameter: ShardedParameter) -> Tensor:
        """The full parameter."""
        if self.fulls is None:
            self.fulls = self.block.gathered()
            if parameter.unit.retains:
                for member, full in zip(self.block.parameters, self.fulls, strict=True):
                    member.retained = full
        return self.fulls[self.block.parameters.index(parameter)]

    def read(self, parameter: ShardedParameter, full: Tensor | None = None) -> Tensor:
        """The same for training: one read until ``free``, whose gradients autograd sums. ``full``, if it is that already."""
        slot = parameter.slot_number
        if slot not in self._reads:
            self.expected.gradients += 1
            full = self.full(parameter) if full is None else full
            self._reads[slot] = ReadEagerly.apply(full, parameter.gate_now(), parameter, self.expected)
        return self._reads[slot]

    def free(self) -> None:
        """Let go of the full parameters: another block runs."""
        self.fulls = None
        self._reads.clear()


class ReadEagerly(torch.autograd.Function):
    """A full parameter that was gathered with its block; its gradient goes into the block's bucket."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, gate: Tensor, parameter: ShardedParameter, expected: Expected) -> Tensor:
        ctx.expected, ctx.slot, ctx.reduce = expected, parameter.slot, parameter.reduce_arguments()
        return ops.share(full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.compiler.is_compiling() or torch.is_grad_enabled():  # compiled autograd; create_graph=True
            return None, ops.for_gate(grad, ctx.slot, ctx.reduce), None, None
        parameter, how = registry.parameter_of(ctx.slot), Reduction.parse(ctx.reduce[5])
        if parameter.group.ranks_in_all == 1 or how.sync == NONE:  # no communication
            return None, ops.for_gate(grad, ctx.slot, ctx.reduce), None, None
        ops.refuse_sparse(grad)
        return None, PUBLISHING.collect(grad, parameter, how, ctx.expected), None, None


never_a_frame_of_its_own(ReadEagerly.backward)


@never_compiled
def read(parameter: ShardedParameter, cache: dict[Any, Open], full: Tensor | None = None) -> Tensor:
    """The full parameter in eager code. ``cache`` holds the running forward's blocks; ``full``, if it is that already.

    Of repeated blocks only the last one stays full: they run one after the other.
    """
    unit = parameter.unit
    key = parameter.together
    if key not in cache:
        cache[key] = Open(unit.gathered_together()[key])
    if parameter.block > 0:
        for other_key, other in cache.items():
            if other_key[0] not in (0, parameter.block):
                other.free()
    opened = cache[key]
    if torch.is_grad_enabled() and full is None and not unit.keep:
        SAVING.start(unit)
    with outside_of_transforms():  # reads are shared by what runs in them and outside
        if torch.is_grad_enabled() and parameter.param.requires_grad:
            return opened.read(parameter, full)
        if parameter.param.requires_grad and unit.depth > 0 and unit.trains:
            unit.perhaps_again = True  # a reentrant checkpoint reads so in forward
        return opened.full(parameter) if full is None else full


@never_compiled
def read_full(full: Tensor, arguments: tuple[Any, ...]) -> Tensor:
    """``ops.read_full`` of a parameter that is full already, without a copy."""
    with outside_of_transforms():
        return ops.ReadFull.apply(full, *arguments)


# ---- what autograd saves ---------------------------------------------------------------------------------------------
class _Note:
    """In place of a saved tensor: a view of a block's full parameter. ``like``: of tensor parallelism's, mesh, placements, shape, stride."""

    def __init__(self, block: Block, index: int, full: Tensor, tensor: Tensor, like: tuple[Any, ...] | None) -> None:
        self.block, self.index, self.like = block, index, like
        self.contiguous = full.stride()
        self.size, self.stride = tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset() - full.storage_offset()

    def tensor(self) -> Tensor:
        """What was saved."""
        local = self._local()
        if self.like is None:
            return local
        mesh, placements, shape, stride = self.like
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    def _local(self) -> Tensor:
        """A view of the full parameter."""
        full = self._full()
        if self.size == full.shape and self.stride == self.contiguous:
            return full
        if len(self.size) == 2 and self.stride == self.contiguous[::-1] and self.size == full.shape[::-1]:
            return full.t()
        # a copy: in a graph the full parameter may be a view of a bucket
        return full.contiguous().clone().as_strided(self.size, self.stride, self.offset)

    def _full(self) -> Tensor:
        if torch.compiler.is_compiling():  # compiled autograd: a read like any other
            return self.block.parameters[self.index].read_for_backward()
        return self.block.again(self.index)


class Saving:
    """Default hooks for saved tensors, from the first eager read to the next compiled graph or the end of a unit's forward.

    Where somebody else's hooks are active (checkpointing, ``save_on_cpu``) they stay alone: it is theirs to say what is saved.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Block], int]] = {}
        self._hooks = (self._pack, self._unpack)
        self._unit: weakref.ref[Unit] | None = None

    def know(self, full: Tensor, block: Block, index: int) -> None:
        """Views of ``full`` are not to be saved, as long as it lives."""
        pointer = full.untyped_storage().data_ptr()
        known = self._known
        known[pointer] = weakref.ref(full, lambda _: known.pop(pointer, None)), weakref.ref(block), index

    def start(self, unit: Unit) -> None:
        """From here on; until ``unit``'s forward ends at the latest."""
        if saving_hooks() is None:
            push_saving_hooks(*self._hooks)
            self._unit = weakref.ref(unit)

    @never_compiled
    def stop(self, unit: Unit | None = None) -> None:
        """Stop, or only if it was ``unit`` that started."""
        if self._unit is not None and (unit is None or self._unit() is unit):
            hooks = saving_hooks()
            if hooks is not None and hooks[0] == self._hooks[0]:
                pop_saving_hooks()
                self._unit = None

    @never_compiled  # autograd calls it, below whatever runs
    def _pack(self, tensor: Tensor) -> Any:
        local, like = tensor, None
        if isinstance(tensor, DTensor):
            local, like = local_of(tensor), (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        found = self._known.get(storage_pointer(local))
        if found is None:
            return tensor
        full, block = found[0](), found[1]()
        if full is None or block is None or local.dtype != full.dtype:
            return tensor
        return _Note(block, found[2], full, local, like)

    def _unpack(self, packed: Any) -> Tensor:
        return packed.tensor() if isinstance(packed, _Note) else packed


SAVING = Saving()
for _function in (Saving._unpack, _Note.tensor, _Note._local, _Note._full):  # compiled autograd traces these
    never_a_frame_of_its_own(_function)
