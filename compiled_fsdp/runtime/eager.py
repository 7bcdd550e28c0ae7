"""Reads in eager code: a bucket for each repeated block, not held from forward to backward.

The first read of a block's parameter gathers the whole block, through the same door as compiled graphs (``boundary.py``). What
autograd saves of the full parameters is replaced by a note which and how (``Saving``), and gathered again when backward asks;
the last note of a forward that is used up frees it. Gradients are collected until all of the block's are there, and
reduced in one bucket (``publishing.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiled_fsdp import ops
from compiled_fsdp.compat import (
    at_end_of_backward,
    backward_id,
    never_a_frame_of_its_own,
    never_compiled,
    outside_inference_mode,
    pop_saving_hooks,
    push_saving_hooks,
    saving_hooks,
    storage_pointer,
)
from compiled_fsdp.runtime.publishing import PUBLISHING

if TYPE_CHECKING:
    from compiled_fsdp.parameter import ShardedParameter


class Block:
    """A block's parameters in full, for one forward (or one recomputation of a part of it).

    Attributes:
        parameters: of one block and dtype, in registration order.
        expected: how many gradients the reads of this forward will bring, unless some are not used.
    """

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        self.parameters = list(parameters)
        self.expected = 0
        self._reads: dict[int, Tensor] = {}
        self._in_forward: list[Tensor] | None = None
        self._in_backward: list[Tensor] | None = None

    def full(self, parameter: ShardedParameter) -> Tensor:
        """The full parameter while the forward runs."""
        if self._in_forward is None:
            self._in_forward = self._gathered()
        return self._in_forward[self.parameters.index(parameter)]

    def read(self, parameter: ShardedParameter) -> Tensor:
        """The same for training: one read until ``free``, whose gradients autograd sums."""
        slot = parameter.slot_number
        if slot not in self._reads:
            self.expected += 1
            self._reads[slot] = ReadEagerly.apply(self.full(parameter), parameter.gate, parameter, self)
        return self._reads[slot]

    def free(self) -> None:
        """Let go of the full parameters: another block runs, or the forward is over."""
        self._in_forward = None
        self._reads.clear()

    def again(self, index: int) -> Tensor:
        """The full parameter while the backward runs, gathered anew."""
        if self._in_forward is not None:  # backward runs inside of the forward
            return self._in_forward[index]
        if backward_id() == -1:
            raise RuntimeError(
                f"compiled_fsdp: {self.parameters[index].name!r}, which autograd needs for backward, was looked at outside of a backward. It is not "
                "held from forward to backward; shard with reshard_after_forward=False to hold it."
            )
        if self._in_backward is None:
            at_end_of_backward(self._end_backward)  # where notes outlive the backward (retain_graph)
            self._in_backward = self._gathered()
        return self._in_backward[index]

    def _end_backward(self) -> None:
        self._in_backward = None

    def _gathered(self) -> list[Tensor]:
        parameters = self.parameters
        sizes = [size for parameter in parameters for size in parameter.size]
        with torch.no_grad(), outside_inference_mode():
            fulls = ops.gather_full(
                [p.shard for p in parameters], [p.slot for p in parameters], sizes, parameters[0].world
            )
        for index, full in enumerate(fulls):
            SAVING.know(full, self, index)
        return fulls


class ReadEagerly(torch.autograd.Function):
    """A full parameter that was gathered with its block; its gradient goes into the block's bucket."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, gate: Tensor, parameter: ShardedParameter, block: Block) -> Tensor:
        ctx.parameter, ctx.block = weakref.ref(parameter), block
        ctx.slot, ctx.reduce = (
            parameter.slot,
            (list(parameter.shard.shape), parameter.world, parameter.label, parameter.dim),
        )
        return ops.share(full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ops.refuse_sparse(grad)
        parameter = ctx.parameter()
        # compiled autograd; create_graph=True; no communication
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or parameter.world == 1:
            return None, ops.reduce_grad(grad, ctx.slot, *ctx.reduce), None, None
        return None, PUBLISHING.collect(grad, parameter, ctx.block), None, None


never_a_frame_of_its_own(ReadEagerly.backward)


@never_compiled
def read(parameter: ShardedParameter, cache: dict[Any, Block]) -> Tensor:
    """The full parameter in eager code. ``cache`` holds the running forward's blocks.

    Of repeated blocks only the last one stays full: they run one after the other.
    """
    unit = parameter.unit
    key = (parameter.block, parameter.shard.dtype)
    if key not in cache:
        members = [p for p in unit.parameters if p.block == parameter.block and p.shard.dtype == parameter.shard.dtype]
        cache[key] = Block(members)
    if parameter.block > 0:
        for (number, _), other in cache.items():
            if number not in (0, parameter.block):
                other.free()
    block = cache[key]
    if not (torch.is_grad_enabled() and parameter.param.requires_grad):
        return block.full(parameter)
    if not unit.keep:
        SAVING.start()
    return block.read(parameter)


# ---- what autograd saves ---------------------------------------------------------------------------------------------
class _Note:
    """In place of a saved tensor: a view of a block's full parameter."""

    def __init__(self, block: Block, index: int, tensor: Tensor) -> None:
        self.block, self.index = block, index
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def tensor(self) -> Tensor:
        return self._full().as_strided(self.size, self.stride, self.offset)

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
        self._active = False

    def know(self, full: Tensor, block: Block, index: int) -> None:
        """Views of ``full`` are not to be saved, as long as it lives."""
        pointer = full.untyped_storage().data_ptr()
        known = self._known
        known[pointer] = weakref.ref(full, lambda _: known.pop(pointer, None)), weakref.ref(block), index

    def start(self) -> None:
        if saving_hooks() is None:
            push_saving_hooks(*self._hooks)
            self._active = True

    @never_compiled
    def stop(self) -> None:
        if self._active:
            hooks = saving_hooks()
            if hooks is not None and hooks[0] == self._hooks[0]:
                pop_saving_hooks()
                self._active = False

    def _pack(self, tensor: Tensor) -> Any:
        found = self._known.get(storage_pointer(tensor))
        if found is None:
            return tensor
        full, block = found[0](), found[1]()
        if full is None or block is None or tensor.dtype != full.dtype:
            return tensor
        return _Note(block, found[2], tensor)

    def _unpack(self, packed: Any) -> Tensor:
        return packed.tensor() if isinstance(packed, _Note) else packed


SAVING = Saving()
